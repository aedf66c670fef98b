#!/bin/sh
# Remove from an environment what no server needs: headers, tests, static libraries, build tools and byte code.
# Usage: trim.sh ENVIRONMENT
set -eu
packages=$(echo "$1"/lib/python3.*/site-packages)
for unwanted in torch/include torch/test torch/bin torch/share torch/testing/_internal/generated \
    torch/lib/*.a torch/lib/libtorchbind_test.so torch/lib/libjitbackend_test.so torch/lib/libbackend_with_compiler.so \
    torch/lib/libaoti_custom_ops.so numpy/*/tests pip pip-*.dist-info setuptools setuptools-*.dist-info; do
  rm -rf $packages/$unwanted
done
find "$packages" -type d \( -name tests -o -name __pycache__ \) -prune -exec rm -rf {} +
find "$packages" \( -name '*.pyi' -o -name '*.h' -o -name '*.hpp' \) -type f -delete
find "$packages" -name '*.so*' -type f -exec strip --strip-unneeded {} + 2>/dev/null || true
