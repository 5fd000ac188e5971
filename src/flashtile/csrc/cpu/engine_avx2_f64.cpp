// The CPU engine with float64 arithmetic, for AVX2, FMA and F16C.
#define FT_DOUBLE
#include "backward.h"
#include "forward.h"

namespace flashtile {

extern const EnginePasses kAvx2PassesF64 = {forward_pass,
                                            {preprocess_pass, main_pass, reduce_pass, bias_pass, sinks_pass}};

}  // namespace flashtile
