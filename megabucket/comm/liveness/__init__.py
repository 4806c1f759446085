"""Detects lost and stuck ranks: heartbeats in the store of the group, waits in slices, one finding for all ranks.

Each rank has a thread that writes beats into the store (``heartbeat.py``); that of one waiting rank, the watcher, reads those
of all. A wait for a collective is split into short slices; between two slices the waiting rank checks the others
(``watch.py``), and ``observations.py`` says what it sees. The first rank that finds out why a wait cannot end writes its
finding into the store, and all ranks raise that finding.

::

    waiting thread                    thread of the rank                store
      request() / ask()  --mailbox-->   write, read         <------->   <wrapper>/rank/<r>         Beat
      view               <----------    publish a View                  board/rank/<r>             Block: where a rank waits
                                        every heartbeat_s   -------->   board/watch/<group>        Claim of the watcher
                                                                        board/finding/<token>      Finding
"""
