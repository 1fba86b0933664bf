"""Train a tiny vision transformer with PWLUs on handwritten digits with the Hugging Face Trainer, on the CPU in half a minute.

The ViT starts from random weights. pwlu.convert_ replaces its GELUs, a callback adds the two phases of the paper: at first the
PWLUs only watch their inputs, then they are realigned and learn. Every evaluation prints the accuracy and the phase. A run that
was stopped goes on with --resume. The images are scikit-learn's: nothing is downloaded.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

import pwlu
from pwlu.integrations.hugging_face import TwoPhaseCallback, own_group_


def tiny_vit() -> ViTForImageClassification:
    """Two layers of width 32, which see 16 patches of 2 x 2 pixels."""
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=10,
        initializer_range=0.1,
    )
    return ViTForImageClassification(config)


def digits() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """1,797 scans of 8 x 8 pixels: half to train on, half to test."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    examples = [{"pixel_values": image, "labels": int(label)} for image, label in zip(images, data.target, strict=True)]
    train, test = train_test_split(examples, test_size=0.5, random_state=0, stratify=data.target)
    return train, test


def main() -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (default: %(default)s)")
    parser.add_argument(
        "--realign-after", type=int, default=5, help="epochs of Phase I (default: %(default)s, as in the paper)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --folder, whatever its phase")
    parser.add_argument("--folder", type=Path, default=Path("runs/vit"), help="for checkpoints (default: %(default)s)")
    options = parser.parse_args()
    set_seed(0)
    train, test = digits()
    model = tiny_vit()
    print(pwlu.convert_(model, {"pixel_values": torch.stack([example["pixel_values"] for example in train[:2]])}))
    # A checkpoint then has the names by which the Trainer looks for the weights of a ViT when it resumes (transformers #43701).
    model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
    phases = TwoPhaseCallback(realign_after_epochs=options.realign_after)

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        right = prediction.predictions.argmax(-1) == prediction.label_ids
        return {"accuracy": float(right.mean()), "phase": phases.phase}

    arguments = TrainingArguments(
        output_dir=str(options.folder),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=256,
        learning_rate=3e-3,
        weight_decay=0.05,
        warmup_steps=20,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_strategy="epoch",
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=test, compute_metrics=metrics, callbacks=[phases])
    own_group_(trainer)  # no weight decay for PWLUs
    trainer.train(resume_from_checkpoint=options.resume)
    print(f"phase {phases.phase}: test accuracy {100 * trainer.evaluate()['eval_accuracy']:.2f} %")


if __name__ == "__main__":
    main()
