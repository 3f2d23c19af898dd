#!/bin/sh
# Prints the hipcc that build.py and run_channellast_test.sh compile with: of $ROCM_PATH, of $ROCM_HOME, in PATH, or of
# /opt/rocm, the first that is there. Exits with 1 where none is.
for rocm in "${ROCM_PATH:-}" "${ROCM_HOME:-}"; do
    if [ -n "$rocm" ] && [ -x "$rocm/bin/hipcc" ]; then
        echo "$rocm/bin/hipcc"
        exit
    fi
done
if command -v hipcc; then exit; fi
if [ -x /opt/rocm/bin/hipcc ]; then
    echo /opt/rocm/bin/hipcc
    exit
fi
echo "there is no hipcc: looked in \$ROCM_PATH/bin, \$ROCM_HOME/bin, PATH and /opt/rocm/bin" >&2
exit 1
