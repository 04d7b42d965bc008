# The name of the library on torch's full C++ API. That API holds for all releases of one minor version, so these share a
# name; a pre-release (a nightly, a release candidate, a build of the sources) has it for itself alone.
#   2.13.0, 2.13.1+cu130     -> _full_abi_2_13
#   2.15.0.dev20261101+cpu   -> _full_abi_2_15_0_dev20261101_cpu
# `full_abi_path` in torchtitan_ext/op_library.py looks for the same names.
function(tte_full_abi_name version result)
  string(REGEX REPLACE "^([0-9]+\\.[0-9]+)(\\.[0-9]+)*(\\.post[0-9]+)?(\\+.*)?$" "\\1" name "${version}")
  string(REGEX REPLACE "[^A-Za-z0-9]+" "_" name "${name}")
  set(${result} "_full_abi_${name}" PARENT_SCOPE)
endfunction()
