"""Supervised fine-tuning with TRL, out of core: a script of TRL's with one line added.

python examples/sft.py FOLDER PAIRS.jsonl OUT --steps 100     # kill it whenever you like; the same goes on
"""

from __future__ import annotations

import argparse

import datasets
import torch
import transformers
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from holdfast.integrations.transformers import offloaded

SFTTrainer = offloaded(SFTTrainer)  # the line that is added, with its import


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("folder", "pairs", "out"):
        parser.add_argument(name)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    trainer = SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(args.folder),
        args=SFTConfig(
            args.out, max_steps=args.steps, per_device_train_batch_size=2, gradient_accumulation_steps=4,
            learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=datasets.load_dataset("json", data_files=args.pairs, split="train"),
        processing_class=transformers.AutoTokenizer.from_pretrained(args.folder),
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(args.out)


if __name__ == "__main__":
    main()
