"""What trainer backends share: the loss of a micro-batch, packed attention, the learning rate, model folders."""
