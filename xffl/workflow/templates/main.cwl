# Rounds over files, one after the other: begin where the last run has ended, and measure the final model.
cwlVersion: v1.2
class: Workflow
$namespaces: {cwltool: 'http://commonwl.org/cwltool#'}
requirements:
  SubworkflowFeatureRequirement: {}
  MultipleInputFeatureRequirement: {}
inputs:
  project: Directory
  configuration: string
  rounds: int
  results: string
  site: File
  first: int
steps:
  begin:
    run: begin.cwl
    in: {site: site, results: results, first: first, rounds: rounds}
    out: [start, round, more]
  federation:
    run: round.cwl
    in: {round: begin/round, start: begin/start, more: begin/more}
    out: [model, next, goes_on]
    requirements:
      cwltool:Loop:
        loopWhen: $(inputs.more)
        loop: {start: model, round: next, more: goes_on}
        outputMethod: last
outputs:
  model: {type: Directory, outputSource: [federation/model, begin/start], pickValue: first_non_null}
