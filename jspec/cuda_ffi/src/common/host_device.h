// Marks a function that runs on both platforms.
#pragma once

#ifdef __CUDACC__
#define JSPEC_HOST_DEVICE __host__ __device__
#else
#define JSPEC_HOST_DEVICE
#endif
