#!/bin/sh
# On one GPU: sh run. On eight: sh run eight_gpus. Settings may follow, as in sh run model=125m.
# PYTHON is the Python that has torch; what it lacks of the other packages is installed into it.
cd "$(dirname "$0")" && export PYTHONPATH="$PWD" PYTHON="${PYTHON:-python3}"
case $("$PYTHON" --version) in
"Python VERSION."*) ;;
*) echo "the wheels are for Python VERSION, not for $PYTHON: set PYTHON, or make the bundle with --python" && exit 2 ;;
esac
trap : INT # which ends the parts; what they have recorded is packed all the same
"$PYTHON" -m harness.selftest.first_hour "$@" 2>&1 | tee -ai log.txt
tar -czf records.tar.gz results log.txt && echo "$PWD/records.tar.gz has the records and this output"
