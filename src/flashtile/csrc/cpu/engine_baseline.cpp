// The CPU engine for whatever the compiler targets by default.
#include "backward.h"
#include "forward.h"

namespace flashtile {

extern const EnginePasses kBaselinePasses = {forward_pass,
                                             {preprocess_pass, main_pass, reduce_pass, bias_pass, sinks_pass}};

}  // namespace flashtile
