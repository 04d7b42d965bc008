"""Makes the files beside it with torchtitan 0.3.0's own data loader: ``python generate.py``.

Needs torchtitan==0.3.0, torchdata and datasets>=3.6,<4.8 (torchtitan and torch-checkpointing with --no-deps, and what
they import). ``texts/documents.json`` is the data set: each word is in one document once, so that tokens tell where
they come from. A saved file holds the states of all data-parallel ranks, as ``state_dict()`` gives them, and the
sequences that the same loaders served afterwards.
"""

import base64
import json
import random
from pathlib import Path
from typing import Any

import torch
import torchtitan.hf_datasets.text_datasets as text_datasets
from datasets import load_dataset
from torchtitan.hf_datasets import DatasetConfig

HERE = Path(__file__).resolve().parent
NUM_DOCUMENTS = 122
SEQ_LEN = 16
BATCH_SIZE = 2
# Name of a file: data-parallel ranks, steps before it was saved, steps afterwards, arguments of the loader.
SAVED: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "8_ranks_first_epoch": (8, 3, 5, {}),
    "8_ranks_two_epochs": (8, 6, 4, {}),
    "16_ranks_first_epoch": (16, 1, 2, {}),
    "2_ranks_one_worker": (2, 3, 2, {"num_workers": 1}),
    "2_ranks_two_workers": (2, 3, 0, {"num_workers": 2}),
    "2_ranks_old_snapshot": (2, 4, 0, {"num_workers": 1, "snapshot_every_n_steps": 3}),
    "2_ranks_streaming": (2, 3, 4, {"dataset": "streaming"}),
    "1_rank_interleaved": (1, 2, 0, {"dataset": "interleaved"}),
}


class WordTokens:
    """Word j of document i is token 3 + 32 i + j; 1 begins a text and 2 ends it."""

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        words = (word.removeprefix("d").split("w") for word in text.split())
        return [1] * add_bos + [3 + 32 * int(document) + int(place) for document, place in words] + [2] * add_eos


def make_documents() -> list[dict[str, str]]:
    generator = random.Random(0)
    lengths = [generator.randint(1, 21) for _ in range(NUM_DOCUMENTS)]
    return [{"text": " ".join(f"d{i}w{j}" for j in range(length))} for i, length in enumerate(lengths)]


def make_loader(dp_rank: int, dp_size: int, dataset: str = "texts", num_workers: int = 0, **options: Any) -> Any:
    for name, streaming in (("texts", False), ("streaming", True)):
        text_datasets.DATASETS[name] = DatasetConfig(
            path=str(HERE / "texts"),
            loader=lambda path, streaming=streaming: load_dataset(path, split="train", streaming=streaming),
            sample_processor=lambda sample: sample["text"],
        )
    world = {"dp_world_size": dp_size, "dp_rank": dp_rank, "tokenizer": WordTokens(), "seq_len": SEQ_LEN}
    if dataset == "interleaved":
        sources = [text_datasets.HFDataSource(dataset="texts", weight=weight) for weight in (1, 2)]
        interleaved = text_datasets.InterleavedHuggingFaceTextDataLoader
        return interleaved(interleaved.Config(sources=sources), local_batch_size=BATCH_SIZE, **world)
    config = text_datasets.HuggingFaceTextDataLoader.Config(dataset=dataset, num_workers=num_workers)
    return text_datasets.HuggingFaceTextDataLoader(config, local_batch_size=BATCH_SIZE, **world, **options)


def make_saved(dp_size: int, steps_before: int, steps_after: int, options: dict[str, Any]) -> dict[str, Any]:
    states: dict[str, Any] = {}
    continued = []
    for rank in range(dp_size):
        torch.manual_seed(0)  # A loader with workers saves a random base seed.
        loader = make_loader(rank, dp_size, **options)
        batches = iter(loader)
        for _ in range(steps_before):
            next(batches)
        states |= loader.state_dict()
        sequences = []
        for _ in range(steps_after):
            inputs, labels = next(batches)
            rows = zip(inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist(), strict=True)
            sequences += [list(row) for row in rows]
        continued.append(sequences)
    encoded = {
        key: base64.b64encode(value).decode() if isinstance(value, bytes) else value for key, value in states.items()
    }
    return {"steps_before": steps_before, "dataloader": encoded, "continued": continued}


def main() -> None:
    (HERE / "texts").mkdir(exist_ok=True)
    lines = [json.dumps(document) for document in make_documents()]
    (HERE / "texts" / "documents.json").write_text("\n".join(lines) + "\n")
    for name, case in SAVED.items():
        saved = make_saved(*case)
        (HERE / f"{name}.json").write_text(json.dumps(saved, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
