// The CPU engine with float64 arithmetic, for whatever the compiler targets by default.
#define FT_DOUBLE
#include "backward.h"
#include "forward.h"

namespace flashtile {

extern const EnginePasses kBaselinePassesF64 = {forward_pass,
                                                {preprocess_pass, main_pass, reduce_pass, bias_pass, sinks_pass}};

}  // namespace flashtile
