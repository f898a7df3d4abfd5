// The module: every function that Python calls. One translation unit, because tvm-ffi's headers take longer to
// compile than all kernels together.
#include "prefill_launch.cuh"
#include "store_launch.cuh"
#include "swap_in_launch.cuh"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(swap_in, hisparse::swap_in);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_decode, hisparse::store_decode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_extend, hisparse::store_extend);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather, hisparse::gather);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(seed, hisparse::seed);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(reset, hisparse::reset);
