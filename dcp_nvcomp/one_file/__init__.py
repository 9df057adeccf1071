"""One compressed file for what people give to torch.save, under the names of NVIDIA's recipe."""
