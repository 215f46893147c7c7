"""A long run of random loads: `python -m tests.fuzz --seconds 600 [--first SEED] [--drafters eagle3,narrow]`.

Prints what each scenario was; one that fails is made smaller and printed so that it can be played again. Every sixth is
also played through AsyncLLM, where it depends on the machine's pace what happens when.
"""

from __future__ import annotations

import argparse
import logging
import traceback
from itertools import count
from time import monotonic

from tests.fuzz.play import Counts, Wrong, play
from tests.fuzz.play_async import play_async
from tests.fuzz.scenario import DRAFTERS, make_scenario
from tests.fuzz.shrink import shrink


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1 << 30)
    parser.add_argument("--drafters", default=",".join(DRAFTERS))
    parser.add_argument("--target", default=None, help="twin or native; both by default")
    parser.add_argument("--shrink", type=float, default=120.0, help="seconds")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    end, failed, done, total = monotonic() + given.seconds, list[int](), 0, Counts()
    for seed in count(given.first):
        if monotonic() > end or done >= given.count:
            break
        scenario, started = make_scenario(seed, given.drafters.split(","), given.target), monotonic()
        setting, done = scenario.setting, done + 1
        what = f"{seed} {setting.target} {'|'.join({*setting.drafters})} {setting.controller} batch {setting.batch}"
        try:
            counts = play(scenario)
            if seed % 6 == 5:
                play_async(scenario)
        except Wrong as wrong:
            failed.append(seed)
            print(f"{what}: WRONG: {wrong}", flush=True)
            if wrong.__cause__ is not None:
                traceback.print_exception(wrong.__cause__)
            smaller = shrink(scenario, given.shrink)
            print(smaller, flush=True)
            try:
                play(smaller)
            except Wrong as again:
                print(f"which gives: {again}", flush=True)
        else:
            total.add(counts)
            print(f"{what}: {monotonic() - started:.1f} s {vars(counts)}", flush=True)
    print(f"{done} scenarios, wrong: {failed}; {vars(total)}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
