# -DKVPUSH_SANITIZE=address,undefined or thread: everything of this project is built with it.
set(KVPUSH_SANITIZE "" CACHE STRING "Sanitizers: address, undefined, address,undefined or thread")

if(NOT KVPUSH_SANITIZE MATCHES "^(|address|undefined|address,undefined|thread)$")
  message(FATAL_ERROR "KVPUSH_SANITIZE=${KVPUSH_SANITIZE}: expected address, undefined, "
                      "address,undefined or thread")
endif()

function(kvpush_add_sanitizers target)
  if(KVPUSH_SANITIZE)
    target_compile_options(${target} PUBLIC -fsanitize=${KVPUSH_SANITIZE} -fno-sanitize-recover=all
                                            -fno-omit-frame-pointer -g)
    target_link_options(${target} PUBLIC -fsanitize=${KVPUSH_SANITIZE})
    target_compile_definitions(${target} PUBLIC KVPUSH_SANITIZED=1)
  endif()
endfunction()
