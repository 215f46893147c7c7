#!/usr/bin/env bash
# A slim EAGLE-3 head for any model, and what it gains, in stages that are short and can be repeated: each resumes.
#
#   M=model.gguf [D=smaller.gguf] [P=prompts.jsonl] bash tools/model_head.sh STAGE...
#
#   data      texts that the model writes itself, from prompts of its own and those of P
#   long      longer ones, whose prompts are made of these: code to edit, facts as JSON, summaries, further turns
#   train     the head: as many steps as fit into BUDGET seconds, by the speed of a short trial
#   accept    tokens per round by task: a chain of 5 and a tree of 60, at T=0 and T=1
#   bench     speed at T=0, one text at a time: the default, n-gram, suffix, the head
#   batches   the same, 8 and 32 at once
#   sampled   speed at T=1, 1 and 8 at once
#   draft     speed with D as draft model, 1 and 8 at once
#
# HEAD: the head that is measured (slim, if there is one, else the package's for this model). R: where runs go
# (bench-out/model). OUT: where results are copied, if set. LIMIT: seconds after which a stage is stopped (280); call it
# again to go on. SUITE: builtin or a JSONL file. Sizes can be set too, for a trial on a CPU: see the next lines.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 COLUMNS=${COLUMNS:-160}
M=$(realpath "$M") D=${D:+$(realpath "$D")} P=${P:+$(realpath "$P")} R=${R:-bench-out/model} LIMIT=${LIMIT:-280}
HEAD=${HEAD:+$(realpath "$HEAD")} DEVICE=${DEVICE:-auto} SUITE=${SUITE:-builtin}
[ "$SUITE" = builtin ] || SUITE=$(realpath "$SUITE")
OWN=${OWN:-17000} WRAPPED=${WRAPPED:-2500} ROWS=${ROWS:-2048} SHORT=${SHORT:-512} LONG=${LONG:-1024} SHARD=${SHARD:-1000000}
WIDTH=${WIDTH:-512} INNER=${INNER:-2560} VOCAB=${VOCAB:-16384} FEATURES=${FEATURES:-2,8,14,20,26} # hidden layers that are read
BUDGET=${BUDGET:-300} TRIAL=${TRIAL:-36} TOKENS=${TOKENS:-16384} LR=${LR:-1e-3} COMPILE=${COMPILE---compile} EVALS=${EVALS:-8}
PER_TASK=${PER_TASK:-8} ANSWER=${ANSWER:-128} SECONDS_PER_ROW=${SECONDS_PER_ROW:-22} LIMIT_TASK=${LIMIT_TASK:-2} REPEATS=${REPEATS:-2}
PY=$(command -v python || command -v python3)
mkdir -p "$R" && cd "$R" && ln -sfn "$M" "$(basename "$M")" && M=$(basename "$M") # heads name their target by this

say() { echo "=== $(date -u +%T) $*"; }
bounded() { timeout --signal=INT --kill-after=15 "$LIMIT" "$@"; }
keep() { # files...; into OUT, where there is one, with their folders
    [ -z "${OUT:-}" ] || { mkdir -p "$OUT" && cp --parents "$@" "$OUT"; }
}
head_folder() { # HEAD, the one trained here, or the package's
    if [ -n "$HEAD" ]; then echo "$HEAD"; elif [ -f slim/config.json ]; then realpath slim; else
        "$PY" -c 'import sys
from forerun.build.engine import choose_drafter
from forerun.models.load.checkpoint import open_checkpoint
from forerun.core.params import SpeculativeConfig
print(choose_drafter(SpeculativeConfig(drafter="eagle3"), open_checkpoint(sys.argv[1])).draft_model or "")' "$M"
    fi
}
make_texts() { bounded "$PY" -m forerun data make --target "$M" --device "$DEVICE" --temperatures 0,0.8 --shard-tokens "$SHARD" "$@"; }
learn() { # flags...
    bounded "$PY" -m forerun train eagle3 --target "$M" --data data,long --width "$WIDTH" --inner "$INNER" --one-byte \
        --vocab "$VOCAB" --features "$FEATURES" --fc-norm --norm-output --levels 6 --batch-tokens "$TOKENS" --max-length "$LONG" \
        --lr "$LR" --holdout "${HOLDOUT:-0.02}" --device "$DEVICE" --eval-batches "$EVALS" $COMPILE "$@"
}
steps_in_budget() { # by the speed of the trial's last two thirds
    "$PY" -c 'import json, statistics, sys
rates = [json.loads(line)["tokens_per_second"] for line in open("trial/log.jsonl")]
rate = 1 / statistics.mean(1 / one for one in rates[len(rates) // 3 :])
print(max(2, int(0.95 * float(sys.argv[1]) * rate / int(sys.argv[2]))))' "$BUDGET" "$TOKENS"
}
measure() { # NAME flags...: forerun bench, resumed from NAME.raw
    local name=$1 code=0
    bounded "$PY" -m forerun bench --model "$M" --device "$DEVICE" --prompts "$SUITE" --max-tokens "$ANSWER" --repeats "$REPEATS" \
        --out "$name.raw" --json "$name.json" "${@:2}" > "$name.txt" || code=$?
    grep -v '^{' "$name.txt" || true
    [ $code -le 1 ] || say "$name: code $code; the same stage goes on from $R/$name.raw"
    [ $code -ne 1 ] || say "$name: texts differ, see equal in $name.json"
    [ ! -f "$name.json" ] || keep "$name.json" "$name.txt"
}

stage() {
    case $1 in
    data)
        make_texts --out data --own-prompts "$OWN" ${P:+--prompts "$P"} --max-prompt "${PROMPT:-144}" --max-length "$SHORT" --batch "$ROWS" \
            --openings "Write a Python function" --openings "Write a function" --openings "Implement" \
            --openings "Fix the bug in this code:" --openings "Refactor this code:" \
            --openings "Explain what this code does:" --openings "Write a class" --openings "Write a SQL query" \
            --openings "Write a unit test" --openings "Add" --openings "What" --openings "How" --openings "Explain" \
            --openings "Translate" --openings "Summarize" --openings "Write" --openings "Who" --openings "" --openings "" \
            --openings "" | tee data.txt
        keep data.txt
        ;;
    long)
        make_texts --out long --own-prompts 0 --passages data --wrapped "$WRAPPED" --max-prompt "${LONG_PROMPT:-640}" --max-length "$LONG" \
            --batch $(((ROWS + 1) / 2)) | tee long.txt
        keep long.txt
        ;;
    train)
        if [ ! -s steps ]; then
            learn --out trial --steps "$TRIAL" --eval-every 100000 > trial.txt
            steps_in_budget > steps
        fi
        local steps; steps=$(cat steps)
        say "$steps steps of $TOKENS tokens"
        learn --out slim --steps "$steps" --eval-every $((steps / 5 + 1)) --save-every $((steps / 5 + 1)) | tee train.txt
        keep train.txt slim/*.json slim/*.safetensors slim/log.jsonl
        ;;
    accept)
        bounded "$PY" -m forerun.measure.acceptance --target "$M" --drafters "$(head_folder)" --suite "$SUITE" --limit "$PER_TASK" \
            --max-tokens "$ANSWER" --verifiers coupled --seconds "$SECONDS_PER_ROW" --device "$DEVICE" | tee accept.jsonl
        keep accept.jsonl
        ;;
    bench) measure bench --draft-model "$(head_folder)" --drafters auto,ngram,suffix,eagle3 --limit "$LIMIT_TASK" ;;
    batches) measure batches --draft-model "$(head_folder)" --drafters auto,ngram,eagle3 --batches "${BATCHES:-8,32}" --limit "$PER_TASK" ;;
    sampled)
        measure sampled --draft-model "$(head_folder)" --drafters auto,ngram,eagle3 --temperatures 1 \
            --batches "${SAMPLED:-1,8}" --limit "$LIMIT_TASK"
        ;;
    draft)
        measure draft --draft-model "${D:?name the draft model}" --drafters draft_model,draft_model:4,ngram+draft_model \
            --batches "${SAMPLED:-1,8}" --limit "$LIMIT_TASK" --tasks "${DRAFT_TASKS:-code_edit,structured,math_reasoning,qa}"
        ;;
    *) say "no stage $1; see tools/model_head.sh" && exit 2 ;;
    esac
}

for name in "${@:?name a stage}"; do
    say "$name" && begun=$SECONDS
    stage "$name"
    say "$name took $((SECONDS - begun)) s"
done
