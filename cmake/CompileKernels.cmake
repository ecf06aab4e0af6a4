# cmake -DNVCC= -DHOST_COMPILER= -DSOURCES= -DINCLUDE= -DOUT=FILE.fatbin -P CompileKernels.cmake
#
# One fatbin for every architecture that this nvcc knows, and FILE.txt with what each kernel uses of registers and
# memory. Fails on a warning, on a spill, and if nothing came of an architecture.
execute_process(COMMAND "${NVCC}" --list-gpu-arch OUTPUT_VARIABLE known RESULT_VARIABLE code)
if(NOT code EQUAL 0)
  message(FATAL_ERROR "${NVCC} --list-gpu-arch: ${code}")
endif()
set(ARCHITECTURES)
foreach(architecture 80 90 100)
  if("${known}\n" MATCHES "compute_${architecture}[^0-9]")
    list(APPEND ARCHITECTURES ${architecture})
  else()
    message(STATUS "${NVCC} does not know sm_${architecture}: left out")
  endif()
endforeach()

set(flags -fatbin -std=c++20 -O3 --Werror all-warnings -Xptxas -v -ccbin "${HOST_COMPILER}" "-I${INCLUDE}")
foreach(architecture IN LISTS ARCHITECTURES)
  list(APPEND flags -gencode "arch=compute_${architecture},code=sm_${architecture}")
endforeach()
list(GET ARCHITECTURES -1 architecture)
# For what comes later the driver compiles this.
list(APPEND flags -gencode "arch=compute_${architecture},code=compute_${architecture}")

execute_process(COMMAND "${NVCC}" ${flags} ${SOURCES} -o "${OUT}" RESULT_VARIABLE code OUTPUT_VARIABLE said
                ERROR_VARIABLE said)
if(NOT code EQUAL 0)
  message(FATAL_ERROR "nvcc: ${said}")
endif()

string(REPLACE ";" "," said "${said}")
string(REGEX MATCHALL "Compiling entry function '[^']*' for '[^']*'|[0-9]+ bytes stack frame[^\n]*|Used [0-9]+ registers[^\n]*" lines "${said}")
string(REPLACE ";" "\n" report "${lines}")
cmake_path(REPLACE_EXTENSION OUT txt OUTPUT_VARIABLE report_file)
file(WRITE "${report_file}" "${report}\n")
foreach(line IN LISTS lines)
  if(line MATCHES "stack frame" AND NOT line MATCHES "^0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")
    file(REMOVE "${OUT}")
    message(FATAL_ERROR "a kernel spills registers (${report_file}):\n${report}")
  endif()
endforeach()
foreach(architecture IN LISTS ARCHITECTURES)
  if(NOT report MATCHES "for 'sm_${architecture}'")
    file(REMOVE "${OUT}")
    message(FATAL_ERROR "nothing was compiled for sm_${architecture}:\n${said}")
  endif()
endforeach()
