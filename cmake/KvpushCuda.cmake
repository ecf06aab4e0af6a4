# The GPU's copy kernels: one file of machine code for every architecture, kvpush_kernels.fatbin, which the driver
# loads at run time (docs/adr/0018). nvcc is all that this needs, and nothing else of the project needs nvcc.

# Sets `variable` to nvcc: KVPUSH_NVCC (CMake or environment), PATH, /usr/local/cuda, or NVIDIA's packages in the
# environment of the python3 that is found first. Empty if there is none.
function(kvpush_find_nvcc variable)
  set(found "${KVPUSH_NVCC}")
  if(NOT found)
    set(found "$ENV{KVPUSH_NVCC}")
  endif()
  if(NOT found)
    find_program(KVPUSH_FOUND_NVCC nvcc HINTS /usr/local/cuda/bin NO_CACHE)
    if(KVPUSH_FOUND_NVCC)
      set(found "${KVPUSH_FOUND_NVCC}")
    endif()
  endif()
  if(NOT found)
    find_program(python NAMES python3 python NO_CACHE)
    execute_process(
      COMMAND "${python}" -c "import glob, sysconfig; print(*glob.glob(sysconfig.get_path('purelib') + '/nvidia/cu13/bin/nvcc'))"
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(found AND NOT EXISTS "${found}")
    message(FATAL_ERROR "KVPUSH_NVCC=${found} does not exist")
  endif()
  set(${variable} "${found}" PARENT_SCOPE)
endfunction()

if(NOT KVPUSH_CUDA STREQUAL "OFF")
  kvpush_find_nvcc(kvpush_nvcc)
  if(kvpush_nvcc)
    set(kvpush_kernels "${CMAKE_CURRENT_BINARY_DIR}/kvpush_kernels.fatbin")
    file(GLOB kvpush_kernel_sources CONFIGURE_DEPENDS csrc/pack/cuda/*.cu)
    file(GLOB kvpush_kernel_headers CONFIGURE_DEPENDS csrc/pack/*.hpp csrc/pack/cuda/*.hpp)
    add_custom_command(
      OUTPUT "${kvpush_kernels}"
      COMMAND
        "${CMAKE_COMMAND}" "-DNVCC=${kvpush_nvcc}" "-DHOST_COMPILER=${CMAKE_CXX_COMPILER}"
        "-DSOURCES=${kvpush_kernel_sources}" "-DINCLUDE=${CMAKE_CURRENT_SOURCE_DIR}/csrc" "-DOUT=${kvpush_kernels}" -P
        "${CMAKE_CURRENT_SOURCE_DIR}/cmake/CompileKernels.cmake"
      DEPENDS ${kvpush_kernel_sources} ${kvpush_kernel_headers} cmake/CompileKernels.cmake
      COMMENT "Compiling the GPU's kernels with ${kvpush_nvcc}"
      VERBATIM)
    add_custom_target(kvpush_kernels ALL DEPENDS "${kvpush_kernels}")
    install(FILES "${kvpush_kernels}" DESTINATION kvpush)
  elseif(KVPUSH_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVPUSH_CUDA=ON: no nvcc. Put it on PATH, or set KVPUSH_NVCC to it; "
                        "pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl brings one")
  endif()
endif()
