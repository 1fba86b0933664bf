"""fuse_norms_ over two processes: SyncBatchNorm as one process with the whole batch, DDP and FSDP2 as without it."""

import copy

import distributed_worker as worker
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pwlu

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")]


class Network(nn.Module):
    """A norm alone, one with an addition, and two that meet in one."""

    def __init__(self, norm):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.bn1, self.bn2 = norm(8), norm(8)
        self.act1, self.act2, self.act3 = pwlu.PWLU(8), pwlu.PWLU(8, init="silu"), pwlu.PWLU(8, init="silu")
        self.conv3, self.conv4, self.bn3, self.bn4 = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), norm(8), norm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.bn2(self.conv2(x)) + x)
        x = self.act3(self.bn3(self.conv3(x)) + self.bn4(self.conv4(x)))
        return self.head(x.mean((2, 3)))


def network(norm, fused):
    torch.manual_seed(1)
    model = Network(norm).double()
    if fused:
        # The sample is run in one process.
        assert len(pwlu.fuse_norms_(model, torch.randn(2, 3, 6, 6).double()).fused) == 4
    return model


def train(model, batches):
    optimizer = worker.made_optimizer(model)
    pwlu.TwoPhase(model, optimizer, worker.REALIGN_AT)
    worker.train(model, optimizer, batches)


def train_by_hand(model, batches):
    """As DistributedDataParallel does, which takes SyncBatchNorm on a GPU only."""
    optimizer = worker.made_optimizer(model)
    pwlu.TwoPhase(model, optimizer, worker.REALIGN_AT)
    for x, target in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
            parameter.grad /= worker.PROCESSES
        optimizer.step()


def start(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", worker.PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=worker.PROCESSES)
    batches, found = worker.share(rank, worker.data()), {}

    model = network(nn.SyncBatchNorm, fused=True)
    train_by_hand(model, batches)
    found["sync"] = model.state_dict()
    for fused in (True, False):
        model = network(nn.BatchNorm2d, fused)
        train(DistributedDataParallel(model), batches)
        found["replicated", fused] = copy.deepcopy(model.state_dict())
        model = network(nn.BatchNorm2d, fused)
        fully_shard(model, mesh=init_device_mesh("cpu", (worker.PROCESSES,)))
        train(model, batches)
        found["sharded", fused] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        model = network(nn.BatchNorm2d, fused)
        for part in (model.bn1, model.act2, model):  # norm and unit on their own
            fully_shard(part, mesh=init_device_mesh("cpu", (worker.PROCESSES,)))
        train(model, batches)
        found["apart", fused] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fused")
    worker.launch(start, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(worker.PROCESSES)]


def assert_same_state(found, expected):
    assert list(found) == list(expected)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_sync_batch_norm_as_one_process_with_the_whole_batch(results):
    alone = network(nn.BatchNorm2d, fused=False)
    train(alone, worker.data())
    for each in results:
        assert_same_state(each["sync"], alone.state_dict())


@pytest.mark.parametrize("kind", ["replicated", "sharded", "apart"])
def test_as_without_it(results, kind):
    for each in results[: 2 if kind == "replicated" else 1]:  # a full state is the first one's
        assert_same_state(each[kind, True], each[kind, False])
