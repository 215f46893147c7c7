"""llama.cpp's own server, from the package xllamacpp: run it where that is installed.

python llama_server.py TARGET.gguf --port 8091 [--draft DRAFT.gguf --drafted 4]
"""

import argparse
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--draft")
    parser.add_argument("--drafted", type=int, default=4)
    parser.add_argument("--slots", type=int, default=16)
    given = parser.parse_args()
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.port = given.model, given.port
    params.n_parallel, params.n_ctx, params.cpuparams.n_threads = given.slots, 1024 * given.slots, 2
    if given.draft:
        draft = params.speculative.draft
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = given.draft, given.drafted, 1, 0.0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
