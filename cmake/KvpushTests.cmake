# Every test_<unit>.cpp of the given directories becomes one program and one ctest of that name. Other .cpp
# files are helpers for the programs of their own directory.
set(KVPUSH_TEST_TIMEOUT_S 300 CACHE STRING "Limit of one test program, in seconds")

add_library(kvpush_check STATIC tests/cpp/check_main.cpp)
target_include_directories(kvpush_check PUBLIC tests tests/cpp)
target_link_libraries(kvpush_check PUBLIC kvpush_core kvpush_flags)

function(kvpush_add_tests dir)
  file(GLOB sources CONFIGURE_DEPENDS "${dir}/*.cpp")
  set(helpers ${sources})
  list(FILTER helpers EXCLUDE REGEX "/(test_[^/]*|[^/]*_main)\\.cpp$")
  list(FILTER sources INCLUDE REGEX "/test_[^/]*\\.cpp$")
  set(libraries kvpush_check)
  if(helpers)
    string(MAKE_C_IDENTIFIER "kvpush_${dir}" library)
    add_library(${library} STATIC ${helpers})
    target_link_libraries(${library} PUBLIC kvpush_check)
    list(PREPEND libraries ${library})
  endif()
  foreach(source IN LISTS sources)
    get_filename_component(name "${source}" NAME_WE)
    add_executable(${name} "${source}")
    target_link_libraries(${name} PRIVATE ${libraries})
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES TIMEOUT ${KVPUSH_TEST_TIMEOUT_S} SKIP_REGULAR_EXPRESSION
                                            "(^|\n)0 passed, 0 failed, [0-9]+ skipped")
  endforeach()
endfunction()
