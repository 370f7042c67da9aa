#!/bin/bash
# One worker of a batchinfer launch on Slurm. `batchinfer launch --on slurm --template FILE` takes a file like this one
# in its place, and fills in what stands in double braces. What --sbatch-arg says wins over what stands above it.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%a.log
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --gres={{ gres }}
# Two minutes before the end of the job's time a worker saves what it has.
#SBATCH --signal=B:USR1@120
{{ options }}
# By this name `status` and `stop --cancel` find the workers.
#SBATCH --job-name={{ name }}
#SBATCH --array=0-{{ last }}

export BATCHINFER_RANK=$SLURM_ARRAY_TASK_ID
{{ exports }}
worker= told= usr1= term=
end() {
  [ -n "$told" ] || [ -z "$worker" ] || kill -TERM $worker
  told=yes
}
# What each notes comes first: while bash waits, a second signal may cut the first one's trap short.
trap 'usr1=yes; end' USR1
trap 'term=yes; end' TERM
{{ command }} &
worker=$!
[ -z "$told" ] || kill -TERM $worker
wait $worker
status=$?
while kill -0 $worker 2>/dev/null; do
  wait $worker
  status=$?
done
# 33 and 34 say that a new start may help; 75 that a signal came, which calls for one only at the end of the job's time:
# after SIGTERM, by scancel, nobody wants it, and a preempted job Slurm itself queues again.
case $status-$usr1 in
  33-* | 34-* | 75-yes) again=yes ;;
  *) again= ;;
esac
if [ -n "$again" ] && [ -z "$term" ]; then
  echo "batchinfer: the worker ended with $status; this job is queued again" >&2
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit $status
