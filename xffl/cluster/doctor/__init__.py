"""What may be wrong with the machines of a job, found out before the job starts.

:mod:`~xffl.cluster.doctor.examine` finds the hosts: this one, those of a launcher's ranks, or those that ssh reaches.
Each (:mod:`~xffl.cluster.doctor.member`) checks itself with :mod:`~xffl.cluster.doctor.probe`, and meets the others at
torch's store (:mod:`~xffl.cluster.doctor.exchange`, which alone imports torch). Rank 0 judges what they have told, by
:mod:`~xffl.cluster.doctor.compare`. What a host sees of an elastic run is :mod:`~xffl.cluster.lighthouse.page`'s.
"""
