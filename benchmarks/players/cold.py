"""A process from nothing to its first token, and what it was.

python cold.py torch|ours|llama|hf FILE PROMPT
"""

from __future__ import annotations

import os
import sys

from stage import THREADS, outlet

out = outlet()
kind, path, prompt = sys.argv[1:]
answer: object = None
if kind == "torch":
    import torch

    answer = torch.__version__
elif kind == "ours":
    import cutaway

    answer = cutaway.load(path).generate(prompt, max_tokens=1, temperature=0).tokens[0]
elif kind == "llama":
    import llama_cpp

    model = llama_cpp.Llama(path, n_ctx=512, n_threads=THREADS, n_threads_batch=THREADS, verbose=False)
    ids = model.tokenize(prompt.encode(), add_bos=False)
    answer = next(iter(model.generate(ids, temp=0.0)))
elif kind == "hf":
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    folder, name = os.path.split(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    answer = int(model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1])
print(answer, file=out, flush=True)
os._exit(0)  # how long a process takes to end is not asked
