"""One round between cells, in the order in which data passes through the files.

- ``tensors``: the model's tensors by name, their policies, and what each rank holds of them.
- ``coverage``: whether the ranks of a cell train one model: who reduces each parameter's gradient, over which ranks.
- ``plan``: who owns which elements in each cell; groups of equal owners, cut into buckets; form and depth of each.
- ``groups``: the process groups of a round, and the messages on them: values, and each rank's status in a vote.
- ``buffers``: views of the model bucket by bucket, staging buffers, pools of buffers.
- ``first_round``: what is compared once: replicas inside each cell, and cells that hold the same in spite of training.
- ``exchange``: the walk over all buckets: check, swap, combine, broadcast, write; its docstring has the timeline.
- ``cell``: what the ranks of a cell exchange: the result, on their GPUs where NCCL works inside the cell.
- ``transport``: how one bucket gets from cell to cell: exact, masked or encoded; in one hop or two.
- ``global_model``: the last agreed model, and the server optimizer that goes on from it.
- ``global_state``: its state brought to cells that are behind, or put together from the parts that owners have saved.
- ``consensus``: whether a round takes place and whether its result counts, on all ranks alike; where one cannot know,
  the mark of a model whose weights may differ between ranks.

Once, when an aggregator is made: tensors > plan > groups > buffers. In each round: a ``RoundRun`` reads and checks the
model; ``RoundCoordinator.run`` votes, has it exchange the buckets, and votes again; ``RoundRun.commit`` writes the
model.
"""
