"""Run by an environment that has vLLM's CPU build: BASE DTYPE THREADS. Prints tokens/s as one line of JSON, last."""

import json
import os
import random
import statistics
import sys
import time

ROWS, PROMPT, NEW, ROUNDS = 32, 64, 64, 3


def main() -> int:
    base, dtype, threads = sys.argv[1:4]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    from vllm import LLM, SamplingParams

    llm = LLM(model=base, dtype=dtype, max_model_len=1024, max_num_seqs=64, enable_prefix_caching=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, min_tokens=NEW, ignore_eos=True)
    numbers = random.Random(1)  # noqa: S311 - made-up prompts
    prompts = [{"prompt_token_ids": [numbers.randrange(3, 40000) for _ in range(PROMPT)]} for _ in range(ROWS)]
    rates = {}
    for name, some in (("base_32", prompts), ("base_1", prompts[:1])):
        taken = []
        for _ in range(ROUNDS + 1):
            started = time.perf_counter()
            llm.generate(some, sampling, use_tqdm=False)
            taken.append(time.perf_counter() - started)
        rates[name] = len(some) * NEW / statistics.median(taken[1:])
    print(json.dumps(rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
