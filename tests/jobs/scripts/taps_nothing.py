"""A job that imports graftlab and reaches no tap; nor do the workers of its data loader."""

from torch.utils.data import DataLoader

import graftlab as gl

if __name__ == "__main__":
    print([batch.tolist() for batch in DataLoader(range(4), batch_size=2, num_workers=1)], gl.here())
