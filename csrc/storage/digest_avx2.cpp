// Compiled with -mavx2, and called only where the processor has it.
#include "storage/digest_kernel.h"

namespace torchtitan_ext::storage {

extern const DigestKernel kAvx2Digest = kKernel;

}  // namespace torchtitan_ext::storage
