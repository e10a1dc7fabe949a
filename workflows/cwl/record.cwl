cwlVersion: v1.2
class: CommandLineTool
doc: Keep what the final model is worth beside the rounds.
baseCommand: bash
arguments: [{position: 2, valueFrom: record}]
inputs:
  steps: {type: File, inputBinding: {position: 1}, default: {class: File, location: steps.sh}}
  site: {type: File, inputBinding: {position: 3, prefix: --site}}
  results: {type: string, inputBinding: {position: 3, prefix: --results}}
  metrics: {type: File, inputBinding: {position: 3, prefix: --metrics}}
outputs:
  metrics: {type: File, outputBinding: {glob: metrics.json}}
