"""What it gains that an FFN server computes hops of one layer together: rounds with `merge` on and off, in turns.

    python -m tests.e2e.merging --output docs/bench/merging.json

Attention servers share a core, the FFN server has the other. The FFNs are large and have dummy weights, so that the
FFN server is what the others wait for; it is started again between two rounds. Each attention server answers its own
prompts, several at a time, so that batches differ in size and in step. Before that the FFN of a layer alone is timed,
for several hops together and one by one: the most that merging can gain.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from afdpatch.cli import client
from afdpatch.cli.load import Measured, make_prompts, percentile, run_round
from tests.e2e.cluster import ZEROABLE, Cluster
from tests.e2e.driver import rpc
from tests.e2e.servers import OPTIONS

SIZES = {"hidden_size": 1024, "moe_intermediate_size": 2048, "num_local_experts": 8, "num_experts_per_tok": 2}
WORDS = [*OPTIONS, "--load-format", "dummy", "--hf-overrides", json.dumps(SIZES), "--no-enable-prefix-caching"]
EXTRA = {"hop_timeout_s": 60, "recovery_timeout_s": 280}
TOKENS = 48


def one_round(cluster: Cluster, merge: bool, concurrency: int, prompts: int) -> dict[str, Any]:
    """All attention servers answer at once; what came of it."""
    cluster.servers["ffn0"].stop()
    cluster.options("ffn0", merge=merge)
    cluster.start("ffn0")
    cluster.wait(timeout=300)
    users = [server for name, server in cluster.servers.items() if name.startswith("attention")]
    side = "on" if merge else "off"
    with ThreadPoolExecutor(len(users)) as pool:
        begin = time.perf_counter()
        asked = [
            pool.submit(run_round, side, user.url, "m", make_prompts(prompts, 12 + 6 * n), TOKENS, concurrency)
            for n, user in enumerate(users)
        ]
        found: list[Measured] = [answer.result() for answer in asked]
        seconds = time.perf_counter() - begin
    page = client.metrics(cluster.servers["ffn0"].url)
    tpot = [1e3 * value for measured in found for value in measured.tpot]
    return {
        "merge": merge,
        "output_tokens_per_s": sum(measured.tokens for measured in found) / seconds,
        "tpot_ms": {f"p{p}": percentile(tpot, p) for p in (50, 99)},
        "hops": client.total(page, "afd_hops_total"),
        "hops_merged": client.total(page, "afd_hops_merged_total"),
        "errors": [error for measured in found for error in measured.errors],
        "texts": {f"{n} {prompt}": text for n, m in enumerate(found) for prompt, text in m.texts.items()},
    }


def batches(cluster: Cluster) -> list[dict[str, Any]]:
    """What the FFN of a layer takes for several hops together and one by one, in the FFN server's own worker."""
    found = []
    for ranks in (2, 3, 4):
        for rows in (1, 4, 16, 64):
            together, apart = rpc(cluster.servers["ffn0"].url, "seconds_of", ranks, rows, 24)["results"][0]
            ratios = [slow / fast for fast, slow in zip(together, apart, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            ms = 1e3 * statistics.median(together)
            found.append(
                {
                    "ranks": ranks,
                    "rows_each": rows,
                    "together_ms": ms,
                    "apart_over_together": {"median": middle, "p25": low, "p75": high},
                }
            )
    return found


def measure(folder: Path, *, attention: int, rounds: int, concurrency: int, prompts: int) -> dict[str, Any]:
    """Rounds in turns, the first of them for nothing; the report."""
    cores = ("1", *["0"] * attention)
    with Cluster(WORDS, folder, attention=attention, ffn=1, extra=EXTRA, ffn_options=ZEROABLE, cores=cores) as cluster:
        cluster.wait(timeout=400)
        alone = batches(cluster)
        one_round(cluster, True, concurrency, concurrency)
        found = []
        for number in range(2 * rounds):
            found.append(one_round(cluster, number % 2 == 0, concurrency, prompts))
            seen = found[-1]
            print(f"merge {seen['merge']}: {seen['output_tokens_per_s']:.1f} tokens/s", flush=True)
    texts = [seen.pop("texts") for seen in found]
    ratios = [
        on["output_tokens_per_s"] / off["output_tokens_per_s"] for on, off in zip(found[::2], found[1::2], strict=True)
    ]
    return {
        "attention_servers": attention,
        "requests_at_a_time_each": concurrency,
        "one_layer": alone,
        "on_over_off": {"median": statistics.median(ratios), "each": ratios},
        "same_texts": all(other == texts[0] for other in texts),
        "rounds": found,
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", type=int, nargs="+", default=[4], help="attention servers, for each run")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of rounds")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at a time of each attention server")
    parser.add_argument("--prompts", type=int, default=8, help="requests of each attention server in a round")
    parser.add_argument("--output", type=Path, help="write the report as JSON")
    args = parser.parse_args()
    runs = []
    for attention in args.attention:
        folder = Path(tempfile.mkdtemp(prefix="merging-"))
        runs.append(
            measure(
                folder,
                attention=attention,
                rounds=args.rounds,
                concurrency=args.concurrency,
                prompts=args.prompts,
            )
        )
    report = {
        "what": "hops of one layer computed together by one FFN server, against one by one",
        "command": "python -m tests.e2e.merging",
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "sizes": SIZES,
        "tokens_a_request": TOKENS,
        "runs": runs,
    }
    text = json.dumps(report, indent=1)
    if args.output:
        args.output.write_text(text + "\n")
    print(text)
    wrong = [run for run in runs if not run["same_texts"] or any(seen["errors"] for seen in run["rounds"])]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
