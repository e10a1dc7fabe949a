cwlVersion: v1.2
class: CommandLineTool
doc: Find the last whole round among the results, from which to go on.
baseCommand: bash
arguments: [{position: 2, valueFrom: begin}]
inputs:
  steps: {type: File, inputBinding: {position: 1}, default: {class: File, location: steps.sh}}
  site: {type: File, inputBinding: {position: 3, prefix: --site}}
  results: {type: string, inputBinding: {position: 3, prefix: --results}}
  first: {type: int, inputBinding: {position: 3, prefix: --first}}
  rounds: {type: int, inputBinding: {position: 3, prefix: --rounds}}
outputs: # in cwl.output.json
  start: Directory?
  round: int
  more: boolean
