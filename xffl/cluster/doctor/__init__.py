"""What may be wrong with the machines of a job, found out before the job starts.

:mod:`~xffl.cluster.doctor.examine` finds the hosts: this one, those of a launcher's ranks, or those that ssh reaches.
Each runs one :mod:`~xffl.cluster.doctor.probe`, which answers rank 0 with JSON, first about itself, then about the
others; :mod:`~xffl.cluster.doctor.compare` asks and judges. What a host sees of an elastic run is
:mod:`~xffl.cluster.lighthouse.page`'s. :mod:`~xffl.cluster.doctor.torch_pair` alone imports torch.
"""
