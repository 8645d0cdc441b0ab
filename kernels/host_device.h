// MOED_HD marks functions that the host and accelerators compile alike, so that a rule is written once.
#ifndef MOED_KERNELS_HOST_DEVICE_H_
#define MOED_KERNELS_HOST_DEVICE_H_

#ifdef __CUDACC__
#define MOED_HD __host__ __device__
#else
#define MOED_HD
#endif

#endif  // MOED_KERNELS_HOST_DEVICE_H_
