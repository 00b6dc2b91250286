"""Classify text with the Hugging Face Trainer, after the task guide of transformers, on generated reviews.

unisono run -n 2 examples/hf_text_classification.py   # or torchrun --nproc-per-node 2
"""

import random
import tempfile

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

import unisono.huggingface

LIKED = ["superb", "moving", "funny", "warm"]
DISLIKED = ["dull", "clumsy", "boring", "cold"]
OTHERS = ["the", "film", "was", "about", "some", "people", "in", "a", "town", "and", "it", "had", "an", "end"]
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]"}


def make_reviews(count: int, seed: int) -> list[dict]:
    draw = random.Random(seed)
    reviews = []
    for i in range(count):
        words = draw.choices(OTHERS, k=draw.randint(4, 10)) + draw.choices(DISLIKED if i % 2 else LIKED, k=3)
        draw.shuffle(words)
        reviews.append({"text": " ".join(words), "label": 1 - i % 2})
    return reviews


vocabulary = {word: i for i, word in enumerate([*SPECIAL.values(), *LIKED, *DISLIKED, *sorted(set(OTHERS))])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL)


def preprocess(review: dict) -> dict:
    return {**tokenizer(review["text"], truncation=True), "label": review["label"]}


def compute_metrics(eval_pred) -> dict[str, float]:
    predictions, labels = eval_pred
    return {"accuracy": float(np.mean(predictions.argmax(axis=1) == labels))}


set_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=len(vocabulary), num_labels=2, **sizes))
training_args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    learning_rate=3e-3,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=16,
    num_train_epochs=3,
    weight_decay=0.01,
    eval_strategy="epoch",
    report_to=[],
    save_strategy="no",
    use_cpu=True,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=[preprocess(review) for review in make_reviews(192, seed=1)],
    eval_dataset=[preprocess(review) for review in make_reviews(64, seed=2)],
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
    compute_metrics=compute_metrics,
    callbacks=[unisono.huggingface.Callback("powersgd(rank=4)")],
)
trainer.train()
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    print(f"accuracy {metrics['eval_accuracy']:.4f}")
