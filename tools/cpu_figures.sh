#!/usr/bin/env bash
# Figures of the default model on this machine's CPU, pinned to two cores, without pip or network: `bash tools/cpu_figures.sh`
# for all tasks, `bash tools/cpu_figures.sh qa` for one task with more repeats. Python needs torch, transformers, gguf and
# typer; everything lands in $OUT (default: bench-out/cpu), and each part has a time limit, so that a cut loses little.
#   CORES=2,3  PYTHON=python3  OUT=bench-out/cpu  DRAFTERS=auto,ngram,ngram+eagle3  LIMIT=3  TOKENS=64  REPEATS=2  SECONDS_IN_ALL=290
set -u
cd "$(dirname "$0")/.." || exit 2
TASK=${1:-all} CORES=${CORES:-2,3} PYTHON=${PYTHON:-python3} OUT=${OUT:-bench-out/cpu}
DRAFTERS=${DRAFTERS:-auto,ngram,ngram+eagle3} LIMIT=${LIMIT:-3} TOKENS=${TOKENS:-64} REPEATS=${REPEATS:-2} SECONDS_IN_ALL=${SECONDS_IN_ALL:-290}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT"
LIBRARY=src/forerun/models/native/_native.so

part() { # part NAME LIMIT COMMAND...: run it, show it and keep it
  local name=$1 limit=$2
  shift 2
  echo "== $name ($(date +%T), load $(cut -d' ' -f1-3 /proc/loadavg))"
  timeout -k 5 "$limit" "$@" 2>&1 | tee "$OUT/$name.log" | cut -c1-1200
  local code=${PIPESTATUS[0]}
  [ "$code" = 0 ] || echo "== $name ended with $code"
}
pinned() {
  local name=$1 limit=$2
  shift 2
  if command -v taskset >/dev/null; then set -- taskset -c "$CORES" "$@"; else echo "not pinned: there is no taskset"; fi
  part "$name" "$limit" "$@"
}

machine() {
  lscpu | grep -E 'Model name|^CPU\(s\)|Thread|Core\(s\)|Socket|NUMA node|L[123]|MHz|Hypervisor'
  for flag in avx2 avx_vnni avx512f avx512_vnni amx_int8 i8mm asimddp; do
    grep -qw "$flag" /proc/cpuinfo && echo "has $flag"
  done
  for core in ${CORES//,/ }; do
    echo "core $core is one physical core with: $(siblings "$core")"
  done
  gcc --version | head -1
  "$PYTHON" -c 'import platform, torch, transformers; print(platform.python_version(), torch.__version__, transformers.__version__)'
  git log -1 --format='commit %h' 2>/dev/null || true
}

siblings() { cat "/sys/devices/system/cpu/cpu$1/topology/thread_siblings_list" 2>/dev/null || echo "$1"; }

compile() { # what setup.py does, by hand: all C files into one library
  local objects=() flags=(-O3 -g0 -std=gnu11 -ffp-contract=off -fno-math-errno -fvisibility=hidden -pthread -fPIC)
  local folder pids=() pid
  if "$PYTHON" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$PWD/$LIBRARY" 2>/dev/null &&
    [ -z "$(find src/forerun/models/native/c -newer "$LIBRARY")" ]; then # built before, and on this kind of machine
    ls -l "$LIBRARY"
    return
  fi
  folder=$(mktemp -d)
  for source in src/forerun/models/native/c/{,*/}*.c; do
    objects+=("$folder/$(basename "$source").o")
    "${CC:-gcc}" "${flags[@]}" -I src/forerun/models/native/c -c "$source" -o "${objects[-1]}" & pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || return 1; done
  "${CC:-gcc}" -shared -pthread "${objects[@]}" -lm -o "$LIBRARY.new" && mv "$LIBRARY.new" "$LIBRARY" && ls -l "$LIBRARY"
}

chosen='
from forerun.models.native import library
print("native:", library.why_not() or library.isa(), "of", library.paths())
from forerun.cli.doctor import examine
for finding in examine():
    print(finding.about + ":", finding.found, flush=True)
'
export -f machine compile siblings
export CORES PYTHON LIBRARY

part machine 20 bash -c machine
part compile 120 bash -c compile
part isa 30 "$PYTHON" -c "$chosen"
repeats=$REPEATS
[ "$TASK" = all ] || repeats=${REPEATS_OF_ONE:-8}
left=$((SECONDS_IN_ALL - SECONDS - 15)) # bash counts SECONDS from the start; what is left over sums up
pinned "bench-$TASK" "$((left > 10 ? left : 10))" "$PYTHON" -m lab cpu --drafters "$DRAFTERS" --tasks "$TASK" --limit "$LIMIT" \
  --max-tokens "$TOKENS" --repeats "$repeats" --threads 2 --skip-transformers --skip-llama-cpp --skip-modes --batches "" \
  --out "$OUT/rounds-$TASK" --json "$OUT/bench-$TASK.json"
