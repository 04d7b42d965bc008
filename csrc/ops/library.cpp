// Every schema of the package, on one page. Kernels stand in the file named like their op.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(torchtitan_ext, library) { (void)library; }
