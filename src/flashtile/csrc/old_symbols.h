// Versions of glibc's functions that glibc 2.28 has too, whatever the build machine has: manylinux wheels need them.
// Include it wherever one of these functions is called. tests/cpu/test_setup.py names those that are missing here.
#pragma once

#if defined(__linux__) && __has_include(<features.h>)
#include <features.h>  // defines __GLIBC__
#endif

#if defined(__GLIBC__) && defined(__x86_64__)
#define FT_OLD_SYMBOL(name) __asm__(".symver " #name ", " #name "@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
#define FT_OLD_SYMBOL(name) __asm__(".symver " #name ", " #name "@GLIBC_2.17");
#else
#define FT_OLD_SYMBOL(name)
#endif

FT_OLD_SYMBOL(dlopen)  // newer: 2.34
FT_OLD_SYMBOL(dlsym)   // 2.34
FT_OLD_SYMBOL(log)     // 2.29
FT_OLD_SYMBOL(logf)    // 2.27
