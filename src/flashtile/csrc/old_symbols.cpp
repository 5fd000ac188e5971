// What newer glibcs and libstdc++s export and inline code of their headers asks for, defined here for older ones.
#include "old_symbols.h"

#include <new>

#if defined(__GLIBC__) && defined(__GLIBCXX__)

// Since glibc 2.32. std::shared_ptr counts without atomics while it is not 0
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

// Since GCC 11: std::__throw_bad_array_new_length(). A declaration in namespace std would have default visibility
extern "C" [[noreturn]] __attribute__((visibility("hidden"))) void throw_bad_array_new_length() __asm__(
    "_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { throw std::bad_array_new_length(); }

#endif
