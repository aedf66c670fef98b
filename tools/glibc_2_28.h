// SPDX-License-Identifier: Apache-2.0
// Symbols of glibc in the versions that 2.28 has as well. Included before each file of a wheel's kernels (tools/packages.py),
// so that a library that is linked with a newer glibc loads wherever torch's wheels (manylinux_2_28) do.

#pragma once

#if defined(__linux__) && defined(__x86_64__)
asm(".symver log, log@GLIBC_2.2.5");
asm(".symver pthread_create, pthread_create@GLIBC_2.2.5");
asm(".symver pthread_setaffinity_np, pthread_setaffinity_np@GLIBC_2.3.4");
asm(".symver pthread_sigmask, pthread_sigmask@GLIBC_2.2.5");
#elif defined(__linux__) && defined(__aarch64__)
asm(".symver log, log@GLIBC_2.17");
asm(".symver pthread_create, pthread_create@GLIBC_2.17");
asm(".symver pthread_setaffinity_np, pthread_setaffinity_np@GLIBC_2.17");
asm(".symver pthread_sigmask, pthread_sigmask@GLIBC_2.17");
#endif
