"""A fine-tuning script of transformers' Trainer on a tiny random model; it knows nothing of graftlab."""

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
config = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
model = BertForSequenceClassification(config)
if sys.argv[2] == "wrong":
    model.bert.encoder.layer[1].attention.output.LayerNorm.eps = 0.1
generator = torch.Generator().manual_seed(1)
examples = [
    {"input_ids": torch.randint(0, 50, (8,), generator=generator), "labels": torch.tensor(index % 2)}
    for index in range(8)
]
arguments = TrainingArguments(
    sys.argv[1], max_steps=2, per_device_train_batch_size=4, report_to=[], save_strategy="no", use_cpu=True,
    disable_tqdm=True, seed=3,
)  # fmt: skip
Trainer(model, arguments, train_dataset=examples).train()
print("trained")
