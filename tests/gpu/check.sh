#!/bin/sh
# What needs a GPU, in two commands of about two minutes each (mostly compiling, the first time).
#   sh tests/gpu/check.sh tests OUT [group ...]     the GPU tests in a process for each group, or in those that are named;
#                                                   the end of each log is printed, with the slowest tests
#   sh tests/gpu/check.sh bench OUT [arguments]     a short benchmark; arguments go to `python -m lab gpu`
#   sh tests/gpu/check.sh serve OUT [arguments]     a server of an 8B shape under load, about three minutes; arguments go
#                                                   to `python -m lab serve`. Where the machine has no web framework, put
#                                                   its wheels into .carry/wheels first (docs/serving.md, Load test).
# OUT gets the logs, bench.json and passes.png. PYTHON names the interpreter.
what=$1 out=$2
shift 2
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
check() {
    name=$1
    shift
    case "$groups" in *" $name "*) ;; *) return ;; esac
    timeout 285 "$python" -m pytest -q --all --maxfail=4 --tb=short -p no:cacheprovider --durations=3 "$@" \
        >"$out/$name.log" 2>&1
    echo "$name: exit $?" >>"$out/$name.log"
}
if [ "$what" = tests ]; then
    all="grown draft captured packed int8 fp8 models layers plain bits block following kernels experts late sampled compiling compiled target rounds adapters company gemma others sized latent formats hybrids states walks texts rows"
    groups=" ${*:-$all} "
    for name in $groups; do
        case " $all " in *" $name "*) ;; *) echo "no group $name: there are $all" && exit 2 ;; esac
    done
    check grown tests/gpu/test_grown.py tests/gpu/test_cut_trees.py -m gpu &
    check draft tests/gpu/test_draft.py -m gpu -k "not captured" &
    check captured tests/gpu/test_draft.py -m gpu -k captured &
    # kernels of one-byte weights are compiled for every shape and number of rows: in one process they took over 140 s
    check packed tests/gpu/test_packed.py tests/gpu/test_quantized_files.py -m gpu -k "not kernels_agree" &
    check int8 tests/gpu/test_packed.py -m gpu -k "kernels_agree and int8" &
    check fp8 tests/gpu/test_packed.py -m gpu -k "kernels_agree and fp8" &
    check models tests/gpu/test_draft_model.py tests/gpu/test_model_following.py tests/gpu/test_chain_kernels.py tests/gpu/test_sparse_draft.py -m gpu &
    check layers tests/gpu/test_layer_skip.py -m gpu &
    check plain tests/gpu/test_plain_rounds.py tests/gpu/test_mixed.py tests/gpu/test_last_layer.py -m gpu &
    check bits tests/gpu/test_bits.py tests/gpu/test_library_products.py -k "(smollm2 or qwen3 or large or odd or xl or tiled or library) and not gemma4" &
    check block tests/gpu/test_block.py tests/gpu/test_other_heads.py -m gpu &
    check following tests/gpu/test_following.py tests/gpu/test_captured.py tests/gpu/test_hybrid_following.py \
        tests/gpu/test_guests.py -m gpu &
    check kernels tests/gpu/test_draft_kernels.py tests/gpu/test_attention.py tests/gpu/test_walked_groups.py tests/gpu/test_draft_batch.py \
        tests/gpu/test_linear_tiles.py tests/gpu/test_recurrent_kernels.py -m gpu &
    check experts tests/gpu/test_moe.py -m gpu -k "not zz" &
    check latent tests/gpu/test_latent_attention.py tests/gpu/test_moe.py -m gpu -k "zz or latent" &
    check late tests/gpu/test_built_late.py tests/gpu/test_head_swap.py tests/gpu/test_lookups_following.py \
        tests/gpu/test_starters.py -m gpu &
    check sampled tests/verify/test_sampled.py tests/verify/test_warp.py -m gpu &
    check formats tests/gpu/test_head_formats.py -m gpu &
    check compiling tests/gpu/test_compiling.py &
    check compiled tests/gpu/test_compiled.py tests/gpu/test_weight_products.py tests/gpu/test_file_weights.py tests/gpu/test_gguf_weights.py -m gpu &
    check texts tests/gpu/test_packed_texts.py -m gpu -k "drafted or wrongly" &
    check rows tests/gpu/test_packed_texts.py -m gpu -k "not drafted and not wrongly" &
    check target tests/gpu/test_target.py tests/gpu/test_pages.py tests/gpu/test_kv_bytes.py tests/gpu/test_warm_up.py tests/gpu/test_tensor_parallel.py -m gpu -k "not zz" &
    check rounds tests/gpu/test_batch_texts.py tests/gpu/test_encoder_decoder.py tests/gpu/test_pass_clock.py \
        tests/gpu/test_starters_beside_trees.py tests/gpu/test_successors.py tests/gpu/test_switching.py -m gpu &
    check hybrids tests/gpu/test_hybrids.py -m gpu &
    check states tests/gpu/test_hybrid_bits.py -m gpu -k "not False" &
    check walks tests/gpu/test_hybrid_bits.py -m gpu -k "False or captured" &
    check sized tests/gpu/test_bits.py tests/gpu/test_target.py tests/gpu/test_attention.py -m gpu \
        -k "gemma4 or longrope or exaone4 or side_by_side" &
    # kernels of adapters are compiled for every shape and number of rows
    check adapters tests/gpu/test_adapters.py tests/gpu/test_adapter_heads.py -m gpu -k "not company" &
    check company tests/gpu/test_adapters.py -m gpu -k company &
    check gemma tests/gpu/test_bits.py -m gpu -k "gemma and not large and not gemma4" &  # large ones are among the bits
    check others tests/gpu/test_bits.py -m gpu -k "z- and not large and not gemma4" &  # likewise
    wait
    for name in $groups; do
        echo "== $name"
        tail -n 16 "$out/$name.log"
    done
    exit
fi
if [ "$what" = serve ]; then
    if ls .carry/wheels/*.whl >/dev/null 2>&1; then
        site=$(mktemp -d)
        "$python" -m pip install -q --no-index --no-deps --target "$site" .carry/wheels/*.whl || exit 1
        export PYTHONPATH="$PYTHONPATH:$site"
    fi
    "$python" -m lab serve --shape 8b --loads= --clients 1,8,32,64 --modes off,adaptive --requests 192 \
        --max-tokens 96 --repeats 2 --json "$out/serve.json" --plot "$out/serve.png" "$@" >"$out/serve.log" 2>&1
    echo "serve: exit $?"
    grep -v '^{' "$out/serve.log" | tail -n 60
    exit
fi
"$python" -m lab gpu --quick --model "" --json "$out/bench.json" --plot "$out/passes.png" "$@" \
    >"$out/bench.log" 2>&1
echo "bench: exit $?"
grep -v '^{' "$out/bench.log" | tail -n 40
