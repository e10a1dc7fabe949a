"""One round between cells, in the order in which data passes through the files.

Once, when an aggregator is made:

- ``setup``: ranks are compared, and what each of them exchanges is planned.
- ``alike.arithmetic_check``: whether all ranks compute the same bits.
- ``planning.tensors``: the model's tensors by name, their policies, and what each rank holds of them.
- ``planning.coverage``: whether the ranks of a cell train one model: who reduces each parameter's gradient, over which
  ranks.
- ``planning.plan``: who owns which elements in each cell; groups of equal owners, cut into buckets; form and depth of
  each.

In each round:

- ``planning.transfers``: the groups and buckets of the plan as one rank walks them, and whose values count.
- ``groups``: the process groups of a round.
- ``buffers``: views of the model bucket by bucket, and pools of buffers.
- ``exchange``: the memory of a round, and the walk over all buckets: check, send, combine, broadcast, write; its
  docstring has the timeline.
- ``transport``: messages between ranks, and how one bucket gets from cell to cell, in one hop or two.
- ``voting.votes``: what each rank says in a vote, and how all ranks learn it.
- ``decision.consensus``: whether a round takes place and whether its result counts, on all ranks alike.
- ``decision.inconsistent``: whether a model bears the mark that its weights may differ between ranks.

A ``RoundRun`` reads and checks the model; ``RoundCoordinator.run`` votes, has it exchange the buckets, and votes again;
``RoundRun.commit`` writes the model. What a feature does to this is a stage (``stages.stage.RoundStage``) in the list
of the aggregator's rounds, or a way over the buckets of its own (``exchange.Way``), each in a file of ``stages``. A
plain round has neither, and goes through none of these files:

- ``stages``: the first round's comparison, codecs, masks, privacy, norms, moments of optimizers, weights of single
  tensors, the step of the global model; combiners that are no plain mean, some of which compare whole models; the
  model of one cell handed over to all.
- ``alike.unequal_replicas``: which ranks of a cell differ, where a first round finds that some do.
- ``alike.rank_differences``: what is told where ranks have unequal models, or compute unequal values.
- ``several_worlds.compared_at_once``: what ranks of new groups, between cells that are worlds of their own,
  compare in one message.
- ``holder_groups``: the groups of the ranks of a cell that hold the same elements, under a mesh inside the cells.
- ``alike.feature_arithmetic``: what combiners, server rules and codecs compute of the patterns on which ranks
  are compared.
- ``alike.equal_cells``: the comparison of cells that have to start from, or go on with, the same values.
- ``planning.lone_coverage``: ``planning.coverage`` where a job is a single cell.
- ``planning.ddp_parameters``: whose gradients DistributedDataParallel reduces.
- ``planning.changed_tensors``: what is wrong with a model that has other tensors than when rounds were planned.
- ``planning.shared_memory``: tensors that share memory, where rounds read it late.
- ``planning.mesh_cut``: how cells cut a tensor that a mesh inside them shards.
- ``planning.replica_tensors``: what the ranks of a replica hold that a mesh cuts inside the cells.
- ``decision.inconsistent_model``: this mark, which a model gets where a rank could not know what became of a round.
- ``decision.elastic_votes``: votes between cells that are worlds of their own, where a round may be in doubt.
- ``decision.fitting_cells``: which cells such a round has to do without, by what their ranks have said.
- ``decision.left_exchange``: a rank that has left an exchange by an error, for which others may wait.
- ``decision.unlike_votes``: what is wrong where ranks are in different rounds.
- ``decision.unfit_cells``: cells with values that are not finite, refused or left out.
- ``decision.injected_faults``: votes in which this process ends, for tests of what the others do then.
- ``merging``: a mean merged into values that have changed since, in a delayed round.
- ``cell``: the mean of buffers over the ranks of a cell.
- ``arena``: memory that aggregators use one behind the other, where cells come and go.
- ``gpu_memory``: buffers on both sides, where values cross in the host's memory beside a GPU.
- ``streams``: the stream of a GPU that rounds work on, and how long it takes for them.
- ``weights.weight_keepers``: what FSDP2 and ZeRO keep beside the model's tensors, before a round reads and
  writes these.
- ``global_model``: the last agreed model, and the server rule that goes on from it.
- ``global_state``: its state, brought to cells that are behind, and read from checkpoints.
"""
