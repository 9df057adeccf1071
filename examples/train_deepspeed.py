"""Train with DeepSpeed's ZeRO-1 and save compressed files through its checkpoint engine.

    torchrun --nproc-per-node 2 examples/train_deepspeed.py --checkpoints runs/zero --steps 60

Started again, it goes on from the tag that `latest` names. Without a GPU set DS_ACCELERATOR=cpu.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from tiny_gpt import TinyGPT, draw_batch, load_corpus
from torch.nn import functional
from train_fsdp import add_model_arguments, end_distributed, start_distributed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--checkpoints", required=True, help="directory; each save is a tag in it")
    parser.add_argument("--steps", type=int, default=60, help="train up to this step")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    arguments = parser.parse_args()

    import deepspeed  # says what it found on this machine when it is imported

    from dcp_nvcomp.integrations.deepspeed import NvcompCheckpointEngine

    device = start_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = TinyGPT(width=arguments.width, depth=arguments.depth).to(device)
    config = {
        "train_micro_batch_size_per_gpu": arguments.global_batch // ranks,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config
    )
    engine.checkpoint_engine = NvcompCheckpointEngine()
    corpus, generator = load_corpus(), torch.Generator().manual_seed(0)
    if os.path.exists(os.path.join(arguments.checkpoints, "latest")):
        _, client_state = engine.load_checkpoint(arguments.checkpoints)
        generator.set_state(client_state["generator"])
        if rank == 0:
            print(f"goes on after step {engine.global_steps}", flush=True)
    while engine.global_steps < arguments.steps:
        inputs, targets = draw_batch(corpus, generator, arguments.global_batch, rank, ranks)
        logits = engine(inputs.to(device)).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        engine.backward(loss)
        engine.step()
        if engine.global_steps % arguments.save_every == 0:
            engine.save_checkpoint(arguments.checkpoints, client_state={"generator": generator.get_state()})
            if rank == 0:
                print(f"step {engine.global_steps}  loss {loss.item():.4f}  saved", flush=True)
    end_distributed()


if __name__ == "__main__":
    main()
