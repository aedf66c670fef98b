#!/bin/sh
# Copy into an empty root all that an environment needs to run: the environment, its Python, the libraries of the system
# that both load, certificates, names of users, and further programs.
# Usage: root.sh ENVIRONMENT ROOT [PROGRAM...]
set -eu
environment=$1
root=$2
shift 2
python=$("$environment/bin/python" -c 'import sys; print(sys.base_prefix)')
version=$("$environment/bin/python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')

copy() { # PATH [OPTION of cp]
  mkdir -p "$root$(dirname "$1")"
  cp -a ${2:-} "$1" "$root$1"
}

mkdir -p "$root/tmp" "$root/data" "$root/proc" "$root/dev" "$root/usr/lib/ssl"
chmod 1777 "$root/tmp" "$root/data"
for path in "$environment" "$python/bin/python3" "$python/bin/$version" "$python/lib/$version" "$python"/lib/libpython*; do
  if [ -e "$path" ]; then copy "$path"; fi
done
# Of the standard library, what no server imports.
library=$root$python/lib/$version
(cd "$library" && rm -rf ensurepip idlelib lib2to3 pydoc_data site-packages tkinter turtle.py turtledemo config-*)
rm -f "$library"/lib-dynload/_t[ek]*  # _test*, _tkinter
find "$library" -type d \( -name test -o -name tests -o -name __pycache__ \) -prune -exec rm -rf {} +
if command -v strip > /dev/null; then find "$root$python/lib" -name '*.so*' -type f -exec strip --strip-unneeded {} +; fi

# Each library, and the loader, is copied to the path by which the programs and libraries name it.
find "$root$environment" "$root$python" "$@" -type f \( -name '*.so*' -o -perm -u+x \) -exec ldd {} + 2> /dev/null |
  grep -o '/[^ :()]*\.so[^ :()]*' | sort -u | while read -r library; do
  case $library in "$root"*) ;; *) copy "$library" -L ;; esac
done
for file in /etc/passwd /etc/group /etc/nsswitch.conf /etc/ssl/certs/ca-certificates.crt "$@"; do copy "$file" -L; done
ln -s /etc/ssl/certs/ca-certificates.crt "$root/usr/lib/ssl/cert.pem"
