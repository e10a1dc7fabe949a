"""Train a small Llama on the Python manual with Hugging Face's Trainer, in cells that average their models.

``xffl exec --isolate --processes 4 --federated 2,2 train.py``; the same command goes on after a kill.
"""

from __future__ import annotations

import argparse
from pydoc_data import topics

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from xffl.integrations.transformers import federate


class Text(Dataset[dict[str, torch.Tensor]]):
    """Windows of bytes of the Python manual, which comes with Python.

    :param windows: How many windows.
    :param length: Bytes of each.
    """

    def __init__(self, windows: int, length: int) -> None:
        text = "\n".join(topics.topics.values()).encode()[: windows * length]
        self._windows = torch.tensor(list(text)).view(windows, length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self._windows[index]
        return {"input_ids": window, "labels": window}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lora", action="store_true", help="train adapters only: rounds move nothing else")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", help="the folder of checkpoints: 'trained', with --lora 'adapters'")
    options = parser.parse_args()
    output = options.output or ("adapters" if options.lora else "trained")

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    set_seed(0)  # what is frozen is not sent: it is to be the same in all cells, and after a kill
    model = LlamaForCausalLM(config)
    if options.lora:
        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    args = TrainingArguments(
        output_dir=output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        logging_steps=10,
        save_steps=20,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),  # without GPUs and without this, Trainer trains each rank by itself
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Text(2000, 64))
    rounds = federate(trainer, every=10, algorithm="diloco")  # the line that is new
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        sent = sum(report.bytes_across for report in rounds.reports)
        made = len(rounds.reports)
        print(f"cell {rounds.state.cell}: {made} rounds since this start, its first rank sent {sent} bytes", flush=True)


if __name__ == "__main__":
    main()
