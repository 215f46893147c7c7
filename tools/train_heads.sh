#!/usr/bin/env bash
# Train heads of the default model on one GPU, in stages that are short and can be repeated: each resumes.
#
#   M=SmolLM2-135M-Instruct.Q4_1.gguf S=spec_bench.jsonl P=prompts.jsonl bash tools/train_heads.sh STAGE...
#
#   data      texts of the target's own to learn from, and its greedy answers to the suite S, which are never learnt
#   box       the EAGLE-3 head of the package, trained further with Muon, loops cut (INNER: another width of its MLP;
#             BOX_FLAGS=--one-byte: written in one byte per weight)
#   box-check tokens per round of the old head and the new one, decoded for the suite
#   deep      an EAGLE-3 head of LAYERS layers (2): that of the package, or of the folder DEEP_FROM, with further layers
#             that add nothing at first
#   deep-check  tokens per round of that head and this one, decoded for the suite
#   eagle     EAGLE-1, towards its plateau
#   hass      HASS, started from that head
#   more      EAGLE-1 for as many steps more as HASS had: what HASS is to be compared with
#   hass-check  tokens per round of the three, decoded for the suite; their curves as JSON
#   block     block drafters: DSpark, and DFlash from its layers, on greedy texts
#   dflash    DFlash alone, from nothing, on the texts that the others learn from
#   mtp, hydra, medusa2   a multi-token-prediction layer, Hydra's heads, Medusa-2 (another target, in medusa2/target)
#   small     these three side by side on one GPU
#   block-check   tokens per round of DSpark and DFlash, chains of 8, decoded for the suite
#   medusa2-check tokens per round of Medusa-2 on its own target, exact and typical acceptance
#   race      METHODS (all that draft for such a model) one by one, each for MINUTES (2) on the same texts, its rate falling to
#             the end; their curves as a result document, methods.json. Ends after CALL seconds (540), with those of the
#             stages before it, with code 3 where something is left: call it again. A method that fails holds up no other
#   table     `python -m lab spec` with every head that was trained, and those of the package (TABLE_SECONDS: its limit)
#   pack      into OUT what the next machine needs to use or continue RUNS, in parts of 15 MB; PARTS: which of them;
#             PACK=--heads-only: what it needs to use them
#   unpack    the same back, from the folder FROM
#
# R: where runs go (bench-out/heads). OUT: where results are copied, if set. LIMIT: seconds after which a training stage
# is stopped at its last checkpoint (280); call it again to go on. Steps: BOX, DEEP, EAGLE, HASS, DSPARK, DFLASH, MTP, HYDRA,
# MEDUSA2. DEVICE and the sizes of the data can be set too, for a trial on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
ROOT=$PWD HEAD=$PWD/src/forerun/heads/smollm2-135m-eagle3
WHOLE=$(realpath "$M") S=$(realpath "$S") P=${P:+$(realpath "$P")} R=${R:-bench-out/heads} LIMIT=${LIMIT:-280}
mkdir -p "$R" && cd "$R" && ln -sfn "$WHOLE" "$(basename "$WHOLE")" && M=$(basename "$WHOLE") # heads name their target by this
DEVICE=${DEVICE:-auto} SEED=${SEED:-11} ROWS=${ROWS:-4096}
FIRST=${FIRST:-10000} LONG=${LONG:-7000} OWN=${OWN:-22000} GREEDY=${GREEDY:-20000}
KINDS=("Translate German to English:" "Write a Python function" "Fix the bug in this code:" "Who" "What" "How" "Solve"
       "Explain" "Write" "" "" "" "" "" "") # how prompts of the target's own begin: most as it likes
TOKENS=${TOKENS:-32768} COMPILE=${COMPILE---compile} HOLDOUT=${HOLDOUT:-0.02} EVERY=${EVERY:-250} SAVE=${SAVE:-100}
TRAIN=(--target "$M" --data first,own,long --measure-on suite --max-length 1024 --batch-tokens "$TOKENS"
       --save-every "$SAVE" --eval-every "$EVERY" --holdout "$HOLDOUT" --device "$DEVICE" $COMPILE)
EAGLE3=(--vocab 16384 --levels 6 --no-train-head --fc-norm --norm-output --features 2,9,16,23,29)
# as many blocks per step as pay for the target's pass; short steps, many of them
BLOCK=(--data "${BLOCK_DATA:-first,own,long,greedy}" ${HOTTEST:+--hottest "$HOTTEST"} --cut-loops "${CUT:-32}" --vocab 16384
       --layers 5 --levels 8 --anchors "${ANCHORS:-0.15}" --batch-tokens "${BLOCK_TOKENS:-16384}" --stored int8)
CHECK=(--target "$M" --suite "$S" --only chain --temperatures 0 --limit "${PROMPTS:-20}"
       --max-tokens "${ANSWER:-256}" --batch 32 --device "$DEVICE")

say() { echo "$(date +%T) $*"; }
data() { # --out FOLDER flags...; nothing where it is whole
    [ ! -e "$2/provenance.json" ] || return 0
    python -m forerun data make --target "$M" --device "$DEVICE" "$@"
}
train() { # METHOD OUT flags...; stopped after LIMIT seconds: code 124
    local code=0
    say "$1 into $2"
    timeout --signal=INT --kill-after=60 "$LIMIT" python -m forerun train "$1" --out "$2" "${TRAIN[@]}" "${@:3}" || code=$?
    [ $code -ne 124 ] || say "stopped after $LIMIT s; the same stage goes on from $2/checkpoint"
    [ $code -eq 0 ] || exit $code
}
side_by_side() { # stages...; each in a process of its own
    local waiting=() code=0
    for stage in "$@"; do M=$WHOLE bash "$ROOT/tools/train_heads.sh" "$stage" > "$stage.log" 2>&1 & waiting+=($!); done
    for i in "${!waiting[@]}"; do
        wait "${waiting[i]}" || code=$?
        tail -n 3 "${@:i+1:1}.log"
    done
    [ $code -eq 0 ] || exit $code
}
trained() { # the heads in R of the default model, but for starting points of others
    for run in box deep eagle1 hass more mtp hydra dspark dflash; do [ ! -e "$run/config.json" ] || echo "$run"; done
}
keep() { # RUN files...; into OUT, where there is one
    [ -n "${OUT:-}" ] || return 0
    mkdir -p "$OUT/$1"
    for file in "${@:2}"; do [ ! -e "$1/$file" ] || cp "$1/$file" "$OUT/$1/"; done
}
warm() { # compile every step once on a handful of texts, while others are written
    [ ! -e warm.log ] || return 0
    data --out tiny --own-prompts 200 --temperatures 0 --max-length 192 --batch 256 --seed 5 > warm.log 2>&1
    local flags=(--target "$M" --data tiny --max-length 192 --batch-tokens 8192 --holdout 0.2 --device "$DEVICE"
                 --steps 3 --eval-every 3 --eval-batches 1 $COMPILE)
    python -m forerun train eagle3 --out warm/eagle3 "${flags[@]}" --init "$HEAD" --inner 3072 "${EAGLE3[@]}" >> warm.log 2>&1
    python -m forerun train hass --out warm/hass "${flags[@]}" --vocab 16384 >> warm.log 2>&1
    python -m forerun train eagle --out warm/eagle "${flags[@]}" --vocab 16384 >> warm.log 2>&1
    python -m forerun train dspark --out warm/dspark "${flags[@]}" --vocab 16384 --layers 5 >> warm.log 2>&1
    python -m forerun train mtp --out warm/mtp "${flags[@]}" --vocab 16384 >> warm.log 2>&1
}

METHODS=${METHODS:-eagle3 hass medusa hydra dspark dflash2 causal peagle} MINUTES=${MINUTES:-2} CALL=${CALL:-540} TRIAL=${TRIAL:-24} LEAST=${LEAST:-60}
flags_of() { # what a method is called by `forerun train`, and its recipe
    case $1 in
    eagle3) echo eagle3 "${EAGLE3[@]}" --lr 1e-3 ;;
    hass) echo hass --vocab 16384 --lr 1e-3 ;;
    medusa) echo medusa --vocab 16384 --blocks 3 --lr 2e-3 ;;
    hydra) echo hydra --vocab 16384 --blocks 2 --lr 1e-3 ;;
    causal) echo dflash --causal "${BLOCK[@]}" --lr "${BLOCK_LR:-2e-3}" ;; # a one-pass head, as in JetSpec
    *) echo "$1" "${BLOCK[@]}" --lr "${BLOCK_LR:-2e-3}" ;;
    esac
}
race() { # METHOD: as many steps as fit into MINUTES, by the speed of a short trial; code 124 where the call is over
    local flags run=race/$1 left=$((CALL - SECONDS - 20)) steps # 20: to write the head and the document
    [ ! -e "$run.done" ] || return 0
    [ $left -gt "$LEAST" ] || return 124
    read -ra flags <<< "$(flags_of "$1")"
    flags+=(--data "${RACE_DATA:-first,own,long}" --cut-loops "${CUT:-32}" --batch-tokens "$TOKENS")
    if [ ! -s "$run.steps" ]; then # in a folder of its own, without a look at the suite
        (LIMIT=$left && train "${flags[0]}" "$run-trial" "${flags[@]:1}" --measure-on "" --steps "$TRIAL" \
            --eval-every 100000 --eval-batches 1 > "$run.log" 2>&1) || return $?
        python -c 'import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
each = statistics.median(row["seconds"] for row in rows if row["step"] > len(rows) // 3)
print(max(4, int(60 * float(sys.argv[2]) / each)))' "$run-trial/log.jsonl" "$MINUTES" > "$run.steps" || return 1
        rm -rf "$run-trial"
        left=$((CALL - SECONDS - 20))
        [ $left -gt 30 ] || return 124
    fi
    steps=$(cat "$run.steps")
    (LIMIT=$left && train "${flags[0]}" "$run" "${flags[@]:1}" --steps "$steps" --eval-every $((steps / 4 + 1)) \
        --save-every $((steps / 8 + 1)) >> "$run.log" 2>&1) || return $?
    touch "$run.done"
}
race_all() { # code 3: call it again
    local method code=0 found=() failed=()
    mkdir -p race
    for method in $METHODS; do
        code=0
        race "$method" || code=$?
        case $code in
        0) say "$method: $(tail -n 1 "race/$method.log")" && found+=("race/$method") ;;
        124 | 137) break ;;
        *) say "$method failed: $(tail -n 3 "race/$method.log")" && failed+=("$method") && code=0 ;;
        esac
    done
    if [ ${#found[@]} -gt 0 ]; then
        python "$ROOT/tools/runs.py" race "${found[@]}" --out methods.json
        [ -z "${OUT:-}" ] || { mkdir -p "$OUT" && cp methods.json "$OUT/"; }
    fi
    [ $code -eq 0 ] || { say "$CALL s are over; call race again for $method and those behind it" && exit 3; }
    [ ${#failed[@]} -eq 0 ] || exit 1
}

stage() {
case ${1:?name a stage} in
data)
    [ -z "$COMPILE" ] || { warm || say "warming failed: $(tail -n 1 warm.log)"; } &
    data --out first --seed "$SEED" --own-prompts "$FIRST" --temperatures 0,1.0 --max-length 512 --batch "$ROWS"
    data --out suite --own-prompts 0 --prompts "$S" --temperatures 0 --max-length 1024 --max-answer "${ANSWER:-256}" --batch 256
    data --out long --seed "$SEED" --own-prompts 0 --passages first --wrapped "$LONG" --max-prompt 640 \
        --temperatures 0,1.0 --max-length 1024 --batch $(((ROWS + 1) / 2))
    for kind in "${KINDS[@]}"; do openings+=(--openings "$kind"); done
    data --out own --seed $((SEED + 1)) --own-prompts "$OWN" ${P:+--prompts "$P"} --temperatures 0,1.0 \
        --max-length 512 --batch "$ROWS" "${openings[@]}"
    [ "$GREEDY" -eq 0 ] || data --out greedy --seed $((SEED + 2)) --own-prompts "$GREEDY" --temperatures 0 \
        --max-length 512 --batch "$ROWS"
    wait
    ;;
box)
    train eagle3 box --init "$HEAD" --inner "${INNER:-0}" --data "${BOX_DATA:-first,own,long}" --cut-loops "${CUT:-32}" \
        --optimizer "${MOVER:-muon}" --lr "${BOX_LR:-2e-4}" --steps "${BOX:-1300}" "${EAGLE3[@]}" ${BOX_FLAGS:-}
    python -m forerun.train.curves box --json box/curve.json
    keep box config.json model.safetensors provenance.json log.jsonl curve.json
    ;;
box-check)
    python -m forerun.measure.acceptance --drafters "$HEAD,box" "${CHECK[@]}" | tee box-check.jsonl
    [ -z "${OUT:-}" ] || cp box-check.jsonl "$OUT/"
    ;;
deep)
    train eagle3 deep --init "${DEEP_FROM:-$HEAD}" --layers "${LAYERS:-2}" --inner "${INNER:-0}" \
        --data "${BOX_DATA:-first,own,long}" --cut-loops "${CUT:-32}" --optimizer "${MOVER:-muon}" \
        --lr "${DEEP_LR:-5e-4}" --steps "${DEEP:-1300}" "${EAGLE3[@]}" ${DEEP_FLAGS:-}
    python -m forerun.train.curves deep --json deep/curve.json
    keep deep config.json model.safetensors provenance.json log.jsonl curve.json
    ;;
deep-check)
    python -m forerun.measure.acceptance --drafters "${DEEP_FROM:-$HEAD},deep" "${CHECK[@]}" | tee deep-check.jsonl
    [ -z "${OUT:-}" ] || cp deep-check.jsonl "$OUT/"
    ;;
eagle)
    train eagle eagle1 --vocab 16384 --lr 1e-3 --steps "${EAGLE:-4000}"
    keep eagle1 config.json model.safetensors provenance.json log.jsonl
    ;;
hass)
    train hass hass --init eagle1 --lr 5e-4 --steps "${HASS:-2000}"
    keep hass config.json model.safetensors provenance.json log.jsonl
    ;;
more)
    train eagle more --init eagle1 --lr 5e-4 --steps "${HASS:-2000}"
    keep more config.json model.safetensors provenance.json log.jsonl
    ;;
hass-check)
    runs=(eagle1 hass)
    [ ! -e more/config.json ] || runs+=(more)
    python -m forerun.train.curves "${runs[@]}" --json hass-curves.json
    python -m forerun.measure.acceptance --drafters "$(IFS=,; echo "${runs[*]}")" "${CHECK[@]}" | tee hass-check.jsonl
    [ -z "${OUT:-}" ] || cp hass-curves.json hass-check.jsonl "$OUT/"
    ;;
block)
    train dspark dspark "${BLOCK[@]}" --lr "${BLOCK_LR:-1e-3}" --steps "${DSPARK:-3000}"
    train dflash dflash "${BLOCK[@]}" --init dspark --lr 5e-4 --steps "${DFLASH:-1000}"
    python -m forerun.train.curves dspark dflash --json block-curves.json
    ;;
dflash)
    train dflash dflash "${BLOCK[@]}" --data "${BLOCK_DATA:-first,own,long}" --lr "${BLOCK_LR:-1e-3}" --steps "${DFLASH:-900}"
    ;;
mtp)
    train mtp mtp --vocab 16384 --lr 1e-3 --steps "${MTP:-1200}"
    ;;
hydra)
    train hydra hydra --vocab 16384 --lr 1e-3 --steps "${HYDRA:-1200}"
    ;;
medusa2)
    train medusa medusa2 --joint --lr 1e-3 --steps "${MEDUSA2:-300}"
    ;;
small)
    side_by_side mtp hydra medusa2
    ;;
block-check)
    python -m forerun.measure.acceptance --drafters dspark,dflash --length 8 "${CHECK[@]}" | tee block-check.jsonl
    ;;
medusa2-check)
    python -m forerun.measure.acceptance --drafters medusa2 --verifiers exact typical "${CHECK[@]}" \
        --target medusa2/target --temperatures 0.7 1 | tee medusa2-check.jsonl
    ;;
race)
    race_all
    ;;
table)
    found=$(trained | paste -sd,)
    python -m lab spec --model "$M" --suite "$S" ${found:+--heads "$found"} --limit "${PROMPTS:-20}" \
        --max-tokens "${ANSWER:-256}" --time-limit "${TABLE_SECONDS:-480}" --out spec --json spec.json --plot spec.png ${TABLE:-}
    [ -z "${OUT:-}" ] || cp spec.json spec.png "$OUT/"
    ;;
pack)
    rm -rf packed && mkdir packed
    python "$ROOT/tools/runs.py" pack ${RUNS:-$(trained)} --out packed ${PACK:-}
    tar cf - -C packed . | split -b 15000000 -d -a 2 - "${OUT:?where to}/heads.tar."
    [ -z "${PARTS:-}" ] || for part in "$OUT"/heads.tar.*; do # eight files and 64 MB may leave a machine at once
        [[ " $PARTS " == *" ${part##*.} "* ]] || rm "$part"
    done
    ls -l "$OUT"
    ;;
unpack)
    cat "${FROM:?where from}"/heads.tar.* | tar xf -
    ;;
*)
    say "no stage $1; see $ROOT/tools/train_heads.sh"
    exit 2
    ;;
esac
say "$1 done"
}

[ $# -gt 0 ] || stage ""
for name in "$@"; do stage "$name"; done
