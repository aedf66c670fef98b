#!/bin/sh
# Remove from an environment what no server needs: headers, tests, static libraries, build tools and byte code.
# Usage: trim.sh ENVIRONMENT [PACKAGE...], with further packages to remove, as paths in site-packages.
set -eu
packages=$(echo "$1"/lib/python3.*/site-packages)
shift
for unwanted in torch/include torch/test torch/share torch/testing/_internal/generated \
    torch/lib/*.a torch/lib/libtorchbind_test.so torch/lib/libjitbackend_test.so torch/lib/libbackend_with_compiler.so \
    torch/lib/libaoti_custom_ops.so numpy/*/tests pip pip-*.dist-info setuptools setuptools-*.dist-info "$@"; do
  rm -rf $packages/$unwanted
done
# torch does not start without this one program.
find "$packages"/torch/bin -type f ! -name torch_shm_manager -delete
find "$packages" -type d \( -name tests -o -name __pycache__ \) -prune -exec rm -rf {} +
find "$packages" \( -name '*.pyi' -o -name '*.h' -o -name '*.hpp' \) -type f -delete
# Others are left: libraries that auditwheel has edited (numpy's, zmq's) do not load after a strip.
if command -v strip > /dev/null; then
  for package in torch/lib uvloop tokenizers hf_xet yaml xxhash; do
    if [ -d "$packages/$package" ]; then find "$packages/$package" -name '*.so' -type f -exec strip --strip-unneeded {} +; fi
  done
fi
