// Compiled with -mavx2, and called only where the processor has it.
#include "storage/casts_kernel.h"

namespace torchtitan_ext::storage {

extern const CastTable kAvx2Casts = kCasts;

}  // namespace torchtitan_ext::storage
