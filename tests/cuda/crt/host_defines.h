/* What CUDA's headers ask of nvcc's, which are no part of torch's packages. */
#pragma once
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __host__
#define __device__
#define __global__
#define __align__(x)
#define __builtin_align__(x)
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __forceinline__ inline
#define __inline__ inline
#define __noinline__ __attribute__((noinline))
#define __no_return__ __attribute__((noreturn))
#define __specialization_static static
