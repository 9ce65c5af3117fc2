"""A Horovod script that trains on handwritten digits, with three lines changed for hvd_hetero.

mpirun -np 4 --oversubscribe --bind-to none python examples/minimal.py
horovodrun --gloo -np 4 -H localhost:4 python examples/minimal.py
python examples/minimal.py
"""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import hvd_hetero as het  # 1: new


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    images, labels = load_digits(return_X_y=True)  # 1797 images of 8 x 8 pixels, values 0 to 16
    x = torch.tensor(images / 16.0, dtype=torch.float32)
    y = torch.tensor(labels)
    train_set = TensorDataset(x[:1437], y[:1437])
    test_x, test_y = x[1437:], y[1437:]

    # 2: was  sampler = DistributedSampler(train_set, hvd.size(), hvd.rank())
    #         loader = DataLoader(train_set, batch_size=128 // hvd.size(), sampler=sampler)
    balancer = het.Balancer(global_batch_size=128)
    loader = balancer.data_loader(train_set, shuffle=True)

    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # 3: was  hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    optimizer = het.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=het.Compression.adaptive(),
        balancer=balancer,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(10):
        balancer.set_epoch(epoch)  # was  sampler.set_epoch(epoch)
        for batch_x, batch_y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch_x), batch_y).backward()
            optimizer.step()
        if hvd.rank() == 0:
            accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
            batches = " ".join(map(str, balancer.plan.local_batches))
            print(f"epoch {epoch}: test accuracy {accuracy:.3f}, local batches {batches}")


if __name__ == "__main__":
    main()
