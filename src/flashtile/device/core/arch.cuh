// Features of the target architecture. The only file that reads __CUDA_ARCH__.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#define FT_GRID_CONSTANT
#else
#define FT_GRID_CONSTANT __grid_constant__
#endif

namespace flashtile {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
constexpr bool kHasAsyncCopy = true;    // cp.async
constexpr bool kHasBf16Convert = true;  // cvt.rn.bf16.f32
constexpr bool kHasMmaK16 = true;       // mma.m16n8k16, cvt.rn.f16x2.f32
constexpr bool kHasNanMinimum = true;   // min.NaN.f32
#else
constexpr bool kHasAsyncCopy = false;
constexpr bool kHasBf16Convert = false;
constexpr bool kHasMmaK16 = false;
constexpr bool kHasNanMinimum = false;
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasVectorReduction = true;  // red.v2.f32
constexpr bool kHasDependentLaunch = true;  // griddepcontrol
#else
constexpr bool kHasVectorReduction = false;
constexpr bool kHasDependentLaunch = false;
#endif

}  // namespace flashtile
