# Which GPUs the kernels are compiled for: sets `result` to a value for CMAKE_CUDA_ARCHITECTURES.
#
# In this order: CUDAARCHS (CMake's own variable), TORCH_CUDA_ARCH_LIST (that of PyTorch's extensions: "8.0 9.0+PTX",
# "Hopper;12.0"), else what FSDP2 is run on: A100, H100, and from CUDA 12.8 on B200 and RTX Blackwell. "90" is SASS and
# PTX: GPUs of which nothing is said compile the PTX.
function(tte_cuda_architectures nvcc_version result)
  if(NOT "$ENV{CUDAARCHS}" STREQUAL "")
    set(architectures "$ENV{CUDAARCHS}")
  elseif(NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
    string(REGEX REPLACE "[ ,]+" ";" entries "$ENV{TORCH_CUDA_ARCH_LIST}")
    foreach(entry IN LISTS entries)
      tte_cuda_entry("${entry}" entry_architectures)
      list(APPEND architectures ${entry_architectures})
    endforeach()
    list(REMOVE_DUPLICATES architectures)
  elseif(nvcc_version VERSION_GREATER_EQUAL 12.8)
    set(architectures 80-real 90 100-real 120)
  else()
    set(architectures 80-real 90)
  endif()
  set(${result} "${architectures}" PARENT_SCOPE)
endfunction()

# One entry of TORCH_CUDA_ARCH_LIST: a compute capability or the name of a generation, with +PTX or without.
function(tte_cuda_entry entry result)
  string(REGEX REPLACE "\\+PTX$" "" name "${entry}")
  set(Volta 70)
  set(Turing 75)
  set(Ampere 80 86)
  set(Ada 89)
  set(Hopper 90)
  set(Blackwell 100 120)
  if(name MATCHES "^([0-9]+)\\.([0-9][af]?)$")
    set(numbers "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
  elseif(name MATCHES "^(Volta|Turing|Ampere|Ada|Hopper|Blackwell)$")
    set(numbers "${${name}}")
  else()
    message(FATAL_ERROR " torchtitan_ext: TORCH_CUDA_ARCH_LIST has '${entry}', expected compute capabilities such as "
                        "'9.0' or '12.0+PTX' or a name from Volta to Blackwell; or set CUDAARCHS.")
  endif()
  list(TRANSFORM numbers APPEND "-real" OUTPUT_VARIABLE architectures)
  if(NOT name STREQUAL entry)  # with +PTX, which the last of them gets
    list(GET numbers -1 last)
    list(REMOVE_ITEM architectures "${last}-real")
    list(APPEND architectures "${last}")
  endif()
  set(${result} "${architectures}" PARENT_SCOPE)
endfunction()
